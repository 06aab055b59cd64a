"""The part of oneDNN's documented C API that lbpar calls. Enumerators are stable within major version 3."""

from __future__ import annotations

AVX512 = 0x20
"""The bit of a dnnl_cpu_isa_t that all with AVX-512 have."""

CDEF = """
typedef int64_t dnnl_dims_t[12];
typedef struct { int major, minor, patch; const char *hash; unsigned cpu_runtime, gpu_runtime; } dnnl_version_t;
typedef struct { int arg; void *memory; } dnnl_exec_arg_t;

const dnnl_version_t *dnnl_version(void);
int dnnl_engine_create(void **engine, int kind, size_t index);
int dnnl_stream_create(void **stream, void *engine, unsigned flags);
int dnnl_set_primitive_cache_capacity(int capacity);
int dnnl_get_effective_cpu_isa(void);

int dnnl_memory_desc_create_with_strides(void **md, int ndims, const dnnl_dims_t dims, int data_type,
                                         const dnnl_dims_t strides);
int dnnl_memory_desc_create_with_tag(void **md, int ndims, const dnnl_dims_t dims, int data_type, int tag);
int dnnl_memory_desc_destroy(void *md);
int dnnl_memory_desc_equal(const void *a, const void *b);
size_t dnnl_memory_desc_get_size(const void *md);
int dnnl_memory_create(void **memory, const void *md, void *engine, void *handle);
int dnnl_memory_set_data_handle(void *memory, void *handle);
int dnnl_memory_destroy(void *memory);

int dnnl_primitive_attr_create(void **attr);
int dnnl_primitive_attr_destroy(void *attr);
int dnnl_primitive_attr_set_scratchpad_mode(void *attr, int mode);
int dnnl_primitive_attr_set_fpmath_mode(void *attr, int mode);
int dnnl_primitive_attr_set_post_ops(void *attr, const void *post_ops);
int dnnl_post_ops_create(void **post_ops);
int dnnl_post_ops_destroy(void *post_ops);
int dnnl_post_ops_append_eltwise(void *post_ops, int alg, float alpha, float beta);
int dnnl_post_ops_append_binary(void *post_ops, int alg, const void *src1_md);

const void *dnnl_primitive_desc_query_md(const void *pd, int what, int index);
int dnnl_primitive_desc_query(const void *pd, int what, int index, void *result);
int dnnl_primitive_desc_destroy(void *pd);
int dnnl_primitive_create(void **primitive, const void *pd);
int dnnl_primitive_execute(const void *primitive, void *stream, int nargs, const dnnl_exec_arg_t *args);
int dnnl_primitive_destroy(void *primitive);

int dnnl_reorder_primitive_desc_create(void **pd, const void *src, void *src_engine, const void *dst,
                                       void *dst_engine, const void *attr);
int dnnl_convolution_forward_primitive_desc_create(void **pd, void *engine, int prop, int alg, const void *src,
    const void *weights, const void *bias, const void *dst, const dnnl_dims_t strides, const dnnl_dims_t dilates,
    const dnnl_dims_t pad_l, const dnnl_dims_t pad_r, const void *attr);
int dnnl_convolution_backward_data_primitive_desc_create(void **pd, void *engine, int alg, const void *diff_src,
    const void *weights, const void *diff_dst, const dnnl_dims_t strides, const dnnl_dims_t dilates,
    const dnnl_dims_t pad_l, const dnnl_dims_t pad_r, const void *hint, const void *attr);
int dnnl_convolution_backward_weights_primitive_desc_create(void **pd, void *engine, int alg, const void *src,
    const void *diff_weights, const void *diff_bias, const void *diff_dst, const dnnl_dims_t strides,
    const dnnl_dims_t dilates, const dnnl_dims_t pad_l, const dnnl_dims_t pad_r, const void *hint, const void *attr);
int dnnl_matmul_primitive_desc_create(void **pd, void *engine, const void *src, const void *weights,
                                      const void *bias, const void *dst, const void *attr);
int dnnl_binary_primitive_desc_create(void **pd, void *engine, int alg, const void *src0, const void *src1,
                                      const void *dst, const void *attr);
int dnnl_pooling_forward_primitive_desc_create(void **pd, void *engine, int prop, int alg, const void *src,
    const void *dst, const dnnl_dims_t strides, const dnnl_dims_t kernel, const dnnl_dims_t dilation,
    const dnnl_dims_t pad_l, const dnnl_dims_t pad_r, const void *attr);
int dnnl_pooling_backward_primitive_desc_create(void **pd, void *engine, int alg, const void *diff_src,
    const void *diff_dst, const dnnl_dims_t strides, const dnnl_dims_t kernel, const dnnl_dims_t dilation,
    const dnnl_dims_t pad_l, const dnnl_dims_t pad_r, const void *hint, const void *attr);
int dnnl_batch_normalization_forward_primitive_desc_create(void **pd, void *engine, int prop, const void *src,
    const void *dst, float epsilon, unsigned flags, const void *attr);
int dnnl_batch_normalization_backward_primitive_desc_create(void **pd, void *engine, int prop,
    const void *diff_src, const void *diff_dst, const void *src, float epsilon, unsigned flags, const void *hint,
    const void *attr);

void omp_set_num_threads(int n);
int omp_get_max_threads(void);
"""

# Data types and format tag.
BF16, F32 = 2, 3
TAG_ANY = 1

# Propagation kinds.
FORWARD_TRAINING, BACKWARD = 64, 128

# Algorithms.
CONV_DIRECT = 0x1
RELU = 0x20
POOL_MAX, POOL_AVG_WITH_PAD = 0x1FF, 0x2FF
BINARY_ADD, BINARY_MUL, BINARY_SUB = 0x1FFF0, 0x1FFF1, 0x1FFF5

# Batch normalisation flags.
USE_GLOBAL_STATS, USE_SCALE, USE_SHIFT = 1, 2, 4

# Execution arguments.
ARG_SRC, ARG_SRC_1, ARG_DST, ARG_WEIGHTS, ARG_BIAS = 1, 2, 17, 33, 41
ARG_MEAN, ARG_VARIANCE, ARG_SCALE, ARG_WORKSPACE, ARG_SCRATCHPAD = 49, 50, 51, 64, 80
ARG_DIFF_SRC, ARG_DIFF_DST, ARG_DIFF_WEIGHTS, ARG_DIFF_BIAS = 129, 145, 161, 169
ARG_DIFF_SCALE, ARG_DIFF_SHIFT = 255, 256
ARG_POST_OP = 32768  # times (index + 1), plus ARG_SRC_1

# Queries.
QUERY_IMPL = 8
QUERY_WEIGHTS, QUERY_DIFF_WEIGHTS, QUERY_WORKSPACE, QUERY_SCRATCHPAD = 131, 132, 135, 136

# Runtimes of the CPU engine that execute within the call and on plain memory.
RUNTIME_SEQ, RUNTIME_OMP = 1, 2
