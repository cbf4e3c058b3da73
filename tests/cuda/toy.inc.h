/* toy.inc.h - the smallest kernel that has all that sass.py looks at: tiles copied to shared memory, tensor cores.
 *
 *   sums[row][column] = sum over tiles and depth of q[row][depth] k[tile][column][depth]
 *
 * Nothing runs it. As it stands it must be accepted; each file of broken/ changes one thing, and must be rejected. */
#include "../../csrc/core/dtype.h"
#include "../../kernels/cuda/kernel_table.h"

#include <cuda_runtime.h>
#include <stdint.h>

#ifndef ROWS_DECLARED
#define ROWS_DECLARED ROWS
#endif
#ifndef COPY_BYTES
#define COPY_BYTES 16
#endif
#ifndef LAUNCH_BOUNDS
#define LAUNCH_BOUNDS __launch_bounds__(32 * WARPS)
#endif
#ifndef SHARED_BYTES
#define SHARED_BYTES TILE_BYTES
#endif
#ifndef BEFORE_THE_LOOP
#define BEFORE_THE_LOOP
#endif

enum { WARPS = 4, ROWS = 16 * WARPS, COLUMNS = 32, DEPTH = 64 };
enum { TILE_BYTES = COLUMNS * DEPTH * 2 };

typedef struct {
    const uint32_t *q, *k; /* pairs of bf16: q (ROWS, DEPTH), k (num_tiles, COLUMNS, DEPTH) */
    float *sums;
    int32_t num_tiles;
    int32_t index; /* for those broken kernels that need a number unknown to the compiler */
} toy_arguments;

static __device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void copy_tile(uint32_t *shared, const uint32_t *tile)
{
#ifdef COPY_THROUGH_REGISTERS
    for (int i = threadIdx.x; i < TILE_BYTES / 16; i += 32 * WARPS)
        ((uint4 *)shared)[i] = ((const uint4 *)tile)[i];
#else
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    for (int i = threadIdx.x; i < TILE_BYTES / COPY_BYTES; i += 32 * WARPS)
#if COPY_BYTES == 16
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i), "l"(tile + 4 * i) : "memory");
#else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to + COPY_BYTES * i),
                     "l"(tile + COPY_BYTES / 4 * i), "n"(COPY_BYTES)
                     : "memory");
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

extern "C" __global__ void LAUNCH_BOUNDS toy_kernel(toy_arguments arguments)
{
    extern __shared__ uint4 dynamic_shared[];
    uint32_t *shared = (uint32_t *)dynamic_shared;
    int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 + lane / 4;
    float sums[COLUMNS / 8][4] = {};
    uint32_t q[DEPTH / 16][4];
#pragma unroll
    for (int d = 0; d < DEPTH / 16; d++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[d][i] = arguments.q[(first_row + i % 2 * 8) * (DEPTH / 2) + d * 8 + i / 2 * 4 + lane % 4];
    BEFORE_THE_LOOP
#pragma unroll 1
    for (int tile = 0; tile < arguments.num_tiles; tile++) {
        __syncthreads();
        copy_tile(shared, arguments.k + (size_t)tile * (TILE_BYTES / 4));
        __syncthreads();
#pragma unroll
        for (int column = 0; column < COLUMNS / 8; column++)
#ifdef ROLLED
#pragma unroll 1
#else
#pragma unroll
#endif
            for (int d = 0; d < DEPTH / 16; d++) {
                const uint32_t *row = shared + (column * 8 + lane / 4) * (DEPTH / 2) + d * 8 + lane % 4;
#ifdef ROLLED
                multiply(sums[column], q[0], row[0], row[4]);
#else
                multiply(sums[column], q[d], row[0], row[4]);
#endif
            }
    }
#pragma unroll
    for (int column = 0; column < COLUMNS / 8; column++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            arguments.sums[(first_row + i / 2 * 8) * COLUMNS + column * 8 + lane % 4 * 2 + i % 2] = sums[column][i];
}

static int64_t scratch_bytes(const void *arguments, int32_t kernel)
{
    (void)arguments, (void)kernel;
    return 0;
}

static int32_t launch(const void *arguments, int32_t kernel, void *stream)
{
    (void)kernel;
    toy_kernel<<<1, 32 * WARPS, TILE_BYTES, (cudaStream_t)stream>>>(*(const toy_arguments *)arguments);
    return (int32_t)cudaGetLastError();
}

static const char *error_text(int32_t error)
{
    return cudaGetErrorString((cudaError_t)error);
}

static const s1f_cuda_kernel kernels[] = {
    {"toy_kernel", S1F_BFLOAT16, DEPTH, ROWS_DECLARED, COLUMNS, WARPS, 1, 1, SHARED_BYTES, S1F_CUDA_SHARED_99_KB}};
