/* emulation.h - the functions of kernels/cuda/sm80_primitives.cuh on the CPU, for tests. No CUDA toolkit is needed.
 *
 * A launch runs its blocks one after the other in random order, each thread of a block as a fiber. The fibers of a warp
 * meet at every operation that takes all 32 lanes, the fibers of a block at its barriers; in between they run in random
 * order. What a GPU leaves undefined is an error here, or happens at random by the seed:
 *   - an asynchronous copy reads and writes when it is issued, or when it is waited for; till then its destination is
 *     NaN
 *   - shared memory is NaN at first
 *   - whatever lies outside of shared memory is an error; so are unaligned addresses there, lanes of a warp or threads
 *     of a block that do not all arrive, and copies without a wait
 * The first error ends the launch and is kept as text. Matrix products are exact, and rounded once, towards zero:
 * tensor cores do about that. Built with -ffp-contract=fast, products that are added become FMAs, as nvcc makes them.
 * Nothing here tells how long anything takes. */
#ifndef S1F_TESTS_EMULATION_H
#define S1F_TESTS_EMULATION_H

#include <cmath>
#include <cstring>

namespace s1f
{
namespace emulation
{

enum operation { MULTIPLY_BF16, MULTIPLY_FP16, LOAD, LOAD_TRANSPOSED, SHUFFLE_XOR, BALLOT, WARP_BARRIER };

struct request { /* of a lane to its warp; pointers are to arrays of the kernel's, on the fiber's stack */
    operation what;
    int number; /* the same in all lanes */
    float *d;
    const uint32_t *a;
    uint32_t b0, b1;
    uint32_t *words;
    float value;
    uint32_t address;
};

inline request request_of(operation what)
{
    request wanted = {};
    wanted.what = what;
    return wanted;
}

void warp_operation(request &wanted);
/* Address of shared memory, once it was checked. */
void *shared_access(uint32_t address, int bytes);
void copy_async_wait(int groups);
int launch(index3 blocks, int threads, int shared_bytes, void (*body)(const void *), const void *context);
float from_fp16(uint16_t bits);
uint16_t to_fp16(float x);
uint16_t to_bf16(float x);

enum { SHARED_BASE = 1024 };
extern int shared_limit;

} // namespace emulation

int thread_index();
index3 block_index();
void block_barrier();
void copy_async_16(uint32_t shared, const void *global, bool valid);
void copy_async_commit();

inline uint32_t shared_base()
{
    return emulation::SHARED_BASE;
}

inline void warp_barrier()
{
    emulation::request wanted = emulation::request_of(emulation::WARP_BARRIER);
    emulation::warp_operation(wanted);
}

template <int N> inline void copy_async_wait()
{
    emulation::copy_async_wait(N);
}

namespace emulation
{
template <typename T> inline T shared_load(uint32_t address)
{
    T found;
    memcpy(&found, shared_access(address, sizeof found), sizeof found);
    return found;
}

template <typename T> inline void shared_store(uint32_t address, const T &value)
{
    memcpy(shared_access(address, sizeof value), &value, sizeof value);
}
} // namespace emulation

inline void load_matrices(uint32_t (&r)[4], uint32_t row_address, emulation::operation what = emulation::LOAD)
{
    emulation::request wanted = emulation::request_of(what);
    wanted.words = r;
    wanted.address = row_address;
    emulation::warp_operation(wanted);
}

inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t row_address)
{
    load_matrices(r, row_address, emulation::LOAD_TRANSPOSED);
}

inline chunk shared_load_16(uint32_t address)
{
    return emulation::shared_load<chunk>(address);
}

inline float_pair shared_load_pair(uint32_t address)
{
    return emulation::shared_load<float_pair>(address);
}

inline void shared_store_4(uint32_t address, uint32_t word)
{
    emulation::shared_store(address, word);
}

template <typename T> inline T global_load(const T *address)
{
    return *address;
}

template <typename T> inline void global_store(T *address, const T &value)
{
    *address = value;
}

inline void global_add(float *address, float value)
{
    *address += value;
}

template <int THREADS> inline void global_add_4(float *sums, const float (&values)[4])
{
    for (int i = 0; i < 4; i++)
        global_add(sums + i * THREADS + thread_index(), values[i]);
}

template <int THREADS> inline void global_load_4(float (&values)[4], const float *sums)
{
    for (int i = 0; i < 4; i++)
        values[i] = global_load(sums + i * THREADS + thread_index());
}

inline emulation::operation multiplication(bf16)
{
    return emulation::MULTIPLY_BF16;
}

inline emulation::operation multiplication(fp16)
{
    return emulation::MULTIPLY_FP16;
}

template <typename Element>
inline void matrix_multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    emulation::request wanted = emulation::request_of(multiplication(Element()));
    wanted.d = d;
    wanted.a = a;
    wanted.b0 = b0;
    wanted.b1 = b1;
    emulation::warp_operation(wanted);
}

inline float shuffle_xor(float value, int mask)
{
    emulation::request wanted = emulation::request_of(emulation::SHUFFLE_XOR);
    wanted.number = mask;
    wanted.value = value;
    emulation::warp_operation(wanted);
    return wanted.value;
}

inline uint32_t warp_ballot(bool condition)
{
    emulation::request wanted = emulation::request_of(emulation::BALLOT);
    wanted.b0 = condition;
    emulation::warp_operation(wanted);
    return wanted.b1;
}

inline float exp2_fast(float x)
{
    return std::exp2(x);
}

inline float log2_fast(float x)
{
    return std::log2(x);
}

inline float reciprocal_fast(float x)
{
    return 1 / x;
}

inline float maximum(float a, float b)
{
    return std::fmax(a, b);
}

inline uint32_t opaque(uint32_t x)
{
    return x;
}

inline int lowest_bit(uint32_t x)
{
    return __builtin_ctz(x);
}

template <typename T> uint32_t pack(float first, float second);

template <> inline uint32_t pack<bf16>(float first, float second)
{
    return emulation::to_bf16(first) | (uint32_t)emulation::to_bf16(second) << 16;
}

template <> inline uint32_t pack<fp16>(float first, float second)
{
    return emulation::to_fp16(first) | (uint32_t)emulation::to_fp16(second) << 16;
}

template <typename T> void unpack(uint32_t word, float &first, float &second);

template <> inline void unpack<bf16>(uint32_t word, float &first, float &second)
{
    const uint32_t low = word << 16, high = word & 0xffff0000u;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, &high, sizeof second);
}

template <> inline void unpack<fp16>(uint32_t word, float &first, float &second)
{
    first = emulation::from_fp16((uint16_t)word);
    second = emulation::from_fp16((uint16_t)(word >> 16));
}

#define S1F_KERNEL(name, ...)                                                                                          \
    extern "C" void name(__VA_ARGS__::arguments arguments);                                                            \
    extern "C" void name(__VA_ARGS__::arguments arguments)                                                             \
    {                                                                                                                  \
        __VA_ARGS__::run(arguments);                                                                                   \
    }

template <typename Arguments>
int launch(void (*kernel)(Arguments), index3 blocks, int threads, int shared_bytes, const Arguments &arguments, void *)
{
    struct call {
        void (*kernel)(Arguments);
        const Arguments *arguments;
    } context = {kernel, &arguments};
    return emulation::launch(
        blocks, threads, shared_bytes,
        [](const void *c) {
            const call &started = *(const call *)c;
            started.kernel(*started.arguments);
        },
        &context);
}

inline int shared_memory_limit()
{
    return emulation::shared_limit;
}

inline const char *error_text(int32_t)
{
    return "of the emulation";
}

} // namespace s1f

#endif
