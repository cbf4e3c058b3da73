/* rate.h - how fast one core multiplies and adds. Kernels are chosen by it, and benchmarks call it the peak. */
#ifndef S1F_RATE_H
#define S1F_RATE_H

typedef struct { /* FLOP per second of one core, a multiply-add counting two */
    double fma;  /* fp32, in the widest vectors that the attention kernels have here */
    double bf16; /* vdpbf16ps on 512 bits; 0 if the machine lacks it */
} s1f_rates;

/* Measures on the calling thread, for about `seconds` in all. The fastest of many slices of some microseconds counts,
 * so a millisecond is enough, and another process on the same core does not spoil it. */
s1f_rates s1f_measure_rates(double seconds);

#endif
