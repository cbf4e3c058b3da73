/* breaches.cu - kernels that break a rule of sm80_primitives.cuh each, for tests of the emulation. */
#include "../../kernels/cuda/kernel_table.h"
#include "../../kernels/cuda/sm80_tile.cuh"

using namespace s1f;

struct breach_arguments {
    const uint32_t *in; /* two blocks' worth: PER_BLOCK words each */
    uint32_t *out;
    int32_t what; /* the rule */
};

enum { PER_BLOCK = 64 * 16, THREADS = 64, SHARED_BYTES = 4096 };

struct small_kernel {
    using arguments = breach_arguments;
    static constexpr int THREADS = ::THREADS, BLOCKS_PER_SM = 1;

    static S1F_DEVICE int first_word(int words) /* of a thread, in `in` and `out` */
    {
        return block_index().x * PER_BLOCK + thread_index() * words;
    }

    static S1F_DEVICE uint32_t slot(int thread) /* a thread's 16 bytes of shared memory */
    {
        return shared_base() + (uint32_t)thread * CHUNK_BYTES;
    }
};

/* Kernels that break a rule each, by p.what. 0 breaks none. */
struct breach : small_kernel {
    static S1F_DEVICE void run(const arguments &p)
    {
        const int t = thread_index(), other = (t + 32) % THREADS, beside = t ^ 1;
        const chunk *source = (const chunk *)(p.in + first_word(4));
        const uint32_t own = slot(t);
        if (p.what != 11) {
            shared_store_4(own, 0);
            block_barrier();
        }
        if (p.what < 11)
            break_order(p, t, other, beside, source, own);
        else
            break_bounds(p, t, own);
    }

    /* Breaches 1 to 10: who may read what another one wrote, or copies. */
    static S1F_DEVICE void break_order(const arguments &p, int t, int other, int beside, const chunk *source,
                                       uint32_t own)
    {
        switch (p.what) {
        case 0:
            for (int i = 0; i < 3; i++) {
                copy_async_16(own, source, t < 40);
                copy_async_commit();
                copy_async_wait<0>();
                warp_barrier();
                put(p, slot(beside));
                block_barrier();
                put(p, slot(other));
                block_barrier();
            }
            break;
        case 1: /* reads what another warp writes */
            shared_store_4(own, 1);
            put(p, slot(other));
            break;
        case 2: /* reads what another lane writes */
            shared_store_4(own, 1);
            put(p, slot(beside));
            break;
        case 3: /* writes what another warp reads */
            put(p, slot(other));
            shared_store_4(own, 1);
            break;
        case 4: /* a barrier of the warp is none of the block */
            shared_store_4(own, 1);
            warp_barrier();
            put(p, slot(other));
            break;
        case 5: /* never waited for, and read */
            copy_async_16(own, source, true);
            copy_async_commit();
            block_barrier();
            put(p, own);
            break;
        case 6: /* waits for all groups but the one that is read */
            copy_async_16(own, source, true);
            copy_async_commit();
            copy_async_wait<1>();
            put(p, own);
            break;
        case 7: /* waits before the group is closed */
            copy_async_16(own, source, true);
            copy_async_wait<0>();
            put(p, own);
            break;
        case 8: /* waited for by the thread that copies, not by the one that reads */
            copy_async_16(own, source, true);
            copy_async_commit();
            copy_async_wait<0>();
            put(p, slot(other));
            break;
        case 9: /* copies over what another warp still reads */
            put(p, slot(other));
            copy_async_16(own, source, true);
            copy_async_commit();
            copy_async_wait<0>();
            break;
        case 10: /* nobody waits */
            copy_async_16(own, source, true);
            copy_async_commit();
            break;
        }
    }

    /* Breaches 11 to 23: memory that is not to be touched so, and calls in which not all take part. */
    static S1F_DEVICE void break_bounds(const arguments &p, int t, uint32_t own)
    {
        switch (p.what) {
        case 11: put(p, own); break; /* never written */
        case 12: shared_store_4(own + SHARED_BYTES, 1); break;
        case 13: shared_store_4(own + 2, 1); break;
        case 14: global_store(p.out + 2 * PER_BLOCK + t, 1u); break;
        case 15: global_store((uint32_t *)p.in + t, 1u); break;
        case 16: copy_async_16(own, p.in + 2 * PER_BLOCK, true); break;
        case 17: copy_async_16(own, p.in + t * 4 + 1, true); break;
        case 18: /* two blocks write alike */ global_store(p.out + t, 1u); break;
        case 19: /* a block adds to what another stored */
            if (block_index().x == 0)
                global_store((float *)p.out, 1.0f);
            else
                global_add((float *)p.out, 1.0f);
            break;
        case 20: /* half a warp */
            if (t % 32 < 16)
                warp_barrier();
            break;
        case 21: /* half a block */
            if (t < 32)
                block_barrier();
            break;
        case 22: /* lanes that do different things together */
            if (t % 32 < 16)
                shuffle_xor(1, 1);
            else
                warp_barrier();
            break;
        case 23: /* reads global memory that another block writes */
            global_store(p.out + first_word(1), global_load(p.out + (1 - block_index().x) * PER_BLOCK + t));
            break;
        }
    }

    static S1F_DEVICE void put(const arguments &p, uint32_t shared)
    {
        global_store(p.out + first_word(1), shared_load_4(shared));
    }
};

/* load_matrices of the first chunk of 16 rows of 256 bytes, swizzled or not, which were copied row by row. */
template <bool SWIZZLED> struct banks : small_kernel {
    static S1F_DEVICE void run(const arguments &p)
    {
        const int t = thread_index();
        for (int i = 0; i < 4; i++) {
            const int row = i * 4 + t / 16, column = t % 16;
            copy_async_16(shared_base() + address(row, column), p.in + i * 256 + t * 4, true);
        }
        copy_async_commit();
        copy_async_wait<0>();
        block_barrier();
        uint32_t r[4];
        load_matrices(r, shared_base() + address(t % 16, 0));
        global_store(p.out + first_word(1), r[0]);
    }

    static S1F_DEVICE uint32_t address(int row, int column)
    {
        return SWIZZLED ? tile_offset<128>(row, column) : (uint32_t)(row * 256 + column * CHUNK_BYTES);
    }
};

S1F_KERNEL(s1f_breach, breach)
S1F_KERNEL(s1f_banks, banks<false>)
S1F_KERNEL(s1f_banks_swizzled, banks<true>)

namespace
{

#define ROW(name)                                                                                                      \
    {                                                                                                                  \
#name, -1, 0, 0, 0, 2, 0, 0, SHARED_BYTES, S1F_CUDA_SHARED_99_KB                                               \
    }
const s1f_cuda_kernel kernels[] = {ROW(s1f_breach), ROW(s1f_banks), ROW(s1f_banks_swizzled)};
void (*const entries[])(breach_arguments) = {s1f_breach, s1f_banks, s1f_banks_swizzled};

int32_t launch_breach(const void *arguments, int32_t kernel, void *stream)
{
    return launch(entries[kernel], {2, 1, 1}, THREADS, SHARED_BYTES, *(const breach_arguments *)arguments, stream);
}

int64_t scratch_bytes(const void *, int32_t)
{
    return 0;
}

} // namespace

S1F_CUDA_OPERATION(breaches, kernels, scratch_bytes, launch_breach, s1f::error_text);
