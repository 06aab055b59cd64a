/* The passes of rows.c with activations of bfloat16: each is called as there, and `_bfloat16`. */
#define BFLOAT16
#include "rows.c"
