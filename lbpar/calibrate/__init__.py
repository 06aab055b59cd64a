"""`lbpar calibrate`: measure kernels and links of a cluster, and write the machine file that plans are priced with."""
