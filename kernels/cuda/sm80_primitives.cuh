/* sm80_primitives.cuh - what a kernel may ask of the device: the one place with PTX.
 *
 * Kernel bodies are headers that include this one and nothing of CUDA. nvcc compiles the functions below; a host
 * compiler finds emulation.h in its place (tests/cuda), which defines the same functions on the CPU. Shared memory is
 * addressed by bytes in a 32-bit window from shared_base() on; arrays come by reference and are indexed by constants
 * once loops are unrolled, so they stay in registers. Fragments and lane maps are those of the PTX ISA, section
 * "Matrix fragments for mma.m16n8k16": with group = lane / 4 and pair = lane % 4,
 *   A (16 x 16)   a[0] row group, columns 2 pair and 2 pair + 1; a[1] row group + 8; a[2], a[3] as these, columns + 8
 *   B (16 x 8)    b0 rows 2 pair and 2 pair + 1 of column group; b1 rows + 8
 *   C, D (16 x 8) d[0], d[1] row group, columns 2 pair and 2 pair + 1; d[2], d[3] row group + 8
 *
 * A kernel is a struct: `arguments` (passed by value), THREADS, BLOCKS_PER_SM (at least so many fit by registers) and
 * `static S1F_DEVICE void run(const arguments &)`. S1F_KERNEL(name, struct) makes an entry of it, which launch()
 * starts. */
#ifndef S1F_CUDA_SM80_PRIMITIVES_CUH
#define S1F_CUDA_SM80_PRIMITIVES_CUH

#include <stdint.h>

#ifdef __CUDACC__
#define S1F_DEVICE __device__ __forceinline__
#define S1F_UNROLL _Pragma("unroll")
#define S1F_KEEP_LOOP _Pragma("unroll 1")
#else
#define S1F_DEVICE inline
#define S1F_UNROLL
#define S1F_KEEP_LOOP
#endif

namespace s1f
{

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

struct alignas(16) chunk { /* 16 bytes: what a thread moves at once */
    uint32_t word[4];
};

struct alignas(8) float_pair {
    float element[2];
};

struct alignas(16) float_quad {
    float element[4];
};

struct alignas(8) word_pair {
    uint32_t word[2];
};

struct index3 {
    int x, y, z;
};

enum { WARP_SIZE = 32, CHUNK_BYTES = 16 };
enum { INVALID_VALUE = 1 }; /* cudaErrorInvalidValue: what a launcher returns of arguments it cannot take */

} // namespace s1f

#ifndef __CUDACC__
#include <emulation.h>
#else

namespace s1f
{

/* -- where a thread is ------------------------------------------------------------------------------------------- */

S1F_DEVICE int thread_index()
{
    return (int)threadIdx.x;
}

S1F_DEVICE index3 block_index()
{
    return {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z};
}

S1F_DEVICE uint32_t shared_base()
{
    extern __shared__ __align__(256) chunk shared_memory[];
    return (uint32_t)__cvta_generic_to_shared(shared_memory);
}

/* -- order ------------------------------------------------------------------------------------------------------- */

/* All threads of the block; what they wrote to memory before is seen by all after. */
S1F_DEVICE void block_barrier()
{
    __syncthreads();
}

/* A barrier for the 32 threads of a warp. */
S1F_DEVICE void warp_barrier()
{
    __syncwarp();
}

/* -- global to shared memory, asynchronously ---------------------------------------------------------------------- */

/* 16 bytes; zeros where not `valid`, and then nothing is read. They are there for this thread once it has waited, for
 * others after a barrier behind that. */
S1F_DEVICE void copy_async_16(uint32_t shared, const void *global, bool valid)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
                 : "memory");
}

/* Closes a group: this thread's copies since the last one. A group may be empty. */
S1F_DEVICE void copy_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most the N latest groups of this thread are under way. */
template <int N> S1F_DEVICE void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* -- shared memory to registers ----------------------------------------------------------------------------------- */

/* Four 8 x 8 matrices of 16-bit elements; lane l names the address of row l % 8 of matrix l / 8 (16 bytes, aligned) and
 * gets in r[i] columns 2 pair and 2 pair + 1 of row `group` of matrix i. */
S1F_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t row_address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_address)
                 : "memory");
}

/* Loads each matrix's transpose. */
S1F_DEVICE void load_matrices_transposed(uint32_t (&r)[4], uint32_t row_address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_address)
                 : "memory");
}

S1F_DEVICE chunk shared_load_16(uint32_t address)
{
    chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
                 : "r"(address)
                 : "memory");
    return c;
}

S1F_DEVICE float_pair shared_load_pair(uint32_t address)
{
    float_pair pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.element[0]), "=f"(pair.element[1])
                 : "r"(address)
                 : "memory");
    return pair;
}

S1F_DEVICE void shared_store_4(uint32_t address, uint32_t word)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

/* -- global memory ------------------------------------------------------------------------------------------------- */

template <typename T> S1F_DEVICE T global_load(const T *address)
{
    return *address;
}

template <typename T> S1F_DEVICE void global_store(T *address, const T &value)
{
    *address = value;
}

/* Sums of several threads, in any order. */
S1F_DEVICE void global_add(float *address, float value)
{
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "f"(value) : "memory");
}

/* Four sums in memory of each of a block's THREADS threads, to which other blocks' add too, in any order. They fill
 * 4 THREADS floats, where each lies is for these two functions to know: sm_90 adds 16 bytes at once, others are fastest
 * where a warp's lie beside each other. */
template <int THREADS> S1F_DEVICE void global_add_4(float *sums, const float (&values)[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(sums + thread_index() * 4)),
        "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
        : "memory");
#else
    S1F_UNROLL
    for (int i = 0; i < 4; i++)
        global_add(sums + i * THREADS + thread_index(), values[i]);
#endif
}

template <int THREADS> S1F_DEVICE void global_load_4(float (&values)[4], const float *sums)
{
    S1F_UNROLL
    for (int i = 0; i < 4; i++) {
#if __CUDA_ARCH__ >= 900
        values[i] = sums[thread_index() * 4 + i];
#else
        values[i] = sums[i * THREADS + thread_index()];
#endif
    }
}

/* -- tensor cores -------------------------------------------------------------------------------------------------- */

/* D += A B of 16 x 16 and 16 x 8 elements, sums in fp32. */
template <typename T>
S1F_DEVICE void matrix_multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <> S1F_DEVICE void matrix_multiply_add<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> S1F_DEVICE void matrix_multiply_add<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* -- between the lanes of a warp; all 32 take part ----------------------------------------------------------------- */

/* The value of lane (own lane ^ mask). */
S1F_DEVICE float shuffle_xor(float value, int mask)
{
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

/* Bit l: whether lane l's condition holds. */
S1F_DEVICE uint32_t warp_ballot(bool condition)
{
    return __ballot_sync(0xffffffffu, condition);
}

/* -- arithmetic ---------------------------------------------------------------------------------------------------- */

/* 2^x, relative error below 2^-22; 0 at -infinity. */
S1F_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* log2 x, absolute error below 2^-22; -infinity at 0. */
S1F_DEVICE float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, relative error below 2^-22; 0 at infinity. */
S1F_DEVICE float reciprocal_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

S1F_DEVICE float maximum(float a, float b)
{
    return fmaxf(a, b);
}

/* x, of which the compiler then knows nothing: what is computed from it stays where it is written, instead of being
 * kept in a register from before a loop on. */
S1F_DEVICE uint32_t opaque(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* Index of the lowest bit set; x is not 0. */
S1F_DEVICE int lowest_bit(uint32_t x)
{
    return __ffs((int)x) - 1;
}

/* Two elements in a register, the first in the low half; rounded to nearest even. */
template <typename T> S1F_DEVICE uint32_t pack(float first, float second);

template <> S1F_DEVICE uint32_t pack<bf16>(float first, float second)
{
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

template <> S1F_DEVICE uint32_t pack<fp16>(float first, float second)
{
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

template <typename T> S1F_DEVICE void unpack(uint32_t word, float &first, float &second);

template <> S1F_DEVICE void unpack<bf16>(uint32_t word, float &first, float &second)
{
    first = __uint_as_float(word << 16);
    second = __uint_as_float(word & 0xffff0000u);
}

template <> S1F_DEVICE void unpack<fp16>(uint32_t word, float &first, float &second)
{
    asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(first), "=f"(second)
        : "r"(word));
}

/* -- launch -------------------------------------------------------------------------------------------------------- */

#define S1F_KERNEL(name, ...)                                                                                          \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::THREADS, __VA_ARGS__::BLOCKS_PER_SM)                     \
        name(const __grid_constant__ __VA_ARGS__::arguments arguments)                                                 \
    {                                                                                                                  \
        __VA_ARGS__::run(arguments);                                                                                   \
    }

/* On the caller's stream; returns the cudaError. Neither allocates nor synchronises. */
template <typename Arguments>
int launch(void (*kernel)(Arguments), index3 blocks, int threads, int shared_bytes, const Arguments &arguments,
           void *stream)
{
    if (shared_bytes > 48 * 1024) { /* more than a kernel gets unasked */
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess)
            return (int)cudaGetLastError(); /* takes it away: the next launch asks for its own */
    }
    dim3 grid((unsigned)blocks.x, (unsigned)blocks.y, (unsigned)blocks.z);
    kernel<<<grid, (unsigned)threads, (size_t)shared_bytes, (cudaStream_t)stream>>>(arguments);
    return (int)cudaGetLastError();
}

/* Bytes of shared memory that a block of the current device may have; minus the cudaError where that cannot be told. */
inline int shared_memory_limit()
{
    int device = 0, bytes = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return error == cudaSuccess ? bytes : -(int)cudaGetLastError();
}

inline const char *error_text(int32_t error)
{
    return cudaGetErrorString((cudaError_t)error);
}

} // namespace s1f

#endif
#endif
