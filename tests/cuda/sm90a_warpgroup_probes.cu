/* sm90a_warpgroup_probes.cu - products of a warpgroup (wgmma) out of tiles as copy_tile lays them out: do the
 * descriptors and lane maps below hold? warpgroup_probes.py says what must come out. They held on an H200.
 *
 *   D = A B       A 64 x 64; B 64 deep; D[row][column] is element d[column / 8 * 4 + r] of thread t, with
 *                 row = 16 (t / 32) + t % 32 / 4 + 8 (r / 2), column % 8 = 2 (t % 4) + r % 2
 *
 *   descriptor of a tile, 64 bits              a tile of 64 columns
 *     0 to 13   address / 16                   plus 2 for each 16 columns of depth; transposed, plus 128 for 16 rows
 *    16 to 29   bytes to the next panel / 16   only transposed, with more than 64 columns: rows x 8
 *    32 to 45   bytes to the next 8 rows / 16  64
 *    49 to 51   where in its period it begins  0
 *    62, 63     swizzle                        1: 128 bytes
 *
 * A kernel with these products would keep the tiles and their copies. Today a warp multiplies 16 x 8 x 16 by mma.sync;
 * a warpgroup of four warps would take 64 x 64 x 16 or 64 x 128 x 16:
 *   copies     cp.async of 16 bytes as today, with fence.proxy.async between wait and barrier
 *   S = Q K^T  both factors from shared memory, by descriptors, in place of ldmatrix
 *   O += P V   P in the same registers, V from shared memory, transposed by a bit of the instruction
 *   order      wgmma.fence, products, commit_group; wait_group before the softmax reads S, and before O is scaled
 *   tiles      of 64 columns as they are, chunk c of row r at c ^ (r % 8): the 128-byte swizzle, if the tile begins at
 *              a multiple of 1,024 bytes; of 128 columns as two panels of 64, one behind the other
 * A warp gets the 16 rows that mma.m16n8k16 would give it, in the same places: softmax, masks and P stay as they are.
 *
 * For sm_90a alone. The library that benchmarks/gpu.py takes along holds them; the installed one does not. */
#include "../../csrc/core/dtype.h"
#include "../../kernels/cuda/kernel_table.h"
#include "../../kernels/cuda/sm80_tile.cuh"

namespace s1f
{

enum probe : int32_t { /* as in warpgroup_probes.py */
                       BOTH_BY_ROWS,
                       SECOND_BY_COLUMNS,
                       FIRST_IN_REGISTERS,
                       TWO_PANELS,
};

enum {
    SIZE = 64,
    PANEL_BYTES = SIZE * SIZE * 2,
    ATOM_BYTES = 1024 /* eight rows of 128 bytes: the swizzle's period */
};

/* PTX ISA, "Matrix Descriptor Format", with the 128-byte swizzle. The tile begins at a multiple of ATOM_BYTES.
 * across: bytes from one panel of 64 to the next, where rows are columns of the product; else nothing. */
S1F_DEVICE uint64_t describe(uint32_t address, uint32_t across)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(across >> 4) << 16 | (uint64_t)(ATOM_BYTES >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* What is written to shared memory by copies and stores is seen by wgmma, which reads by another proxy. */
S1F_DEVICE void fence_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

S1F_DEVICE void begin_products()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

S1F_DEVICE void end_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define REGISTERS_32                                                                                                   \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "  \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_64                                                                                                   \
    REGISTERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "   \
                 "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* d += A B, depth 16. BY_COLUMNS: a row of B's tile is one of its depth, else a column of B. */
template <int BY_COLUMNS> S1F_DEVICE void multiply(float (&d)[32], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGISTERS_32 "}, %32, %33, 1, 1, 1, 0, %34;"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16)
                 : "l"(a), "l"(b), "n"(BY_COLUMNS));
}

template <int BY_COLUMNS> S1F_DEVICE void multiply(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64 "}, %64, %65, 1, 1, 1, 0, %66;"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
                 : "l"(a), "l"(b), "n"(BY_COLUMNS));
}

/* A in registers, as mma.m16n8k16 takes it: rows 16 (t / 32) and the 15 behind them are a warp's. */
template <int BY_COLUMNS> S1F_DEVICE void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGISTERS_32
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
                 : SIXTEEN(d, 0), SIXTEEN(d, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(BY_COLUMNS));
}

struct warpgroup_probes {
    struct arguments {
        const bf16 *a, *b; /* (64, 64); (64, 64), or (64, 128) for TWO_PANELS */
        float *out;        /* (128, 32), or (128, 64): of a thread */
        int32_t probe;
    };
    static constexpr int THREADS = 128, BLOCKS_PER_SM = 1;
    static constexpr int SHARED_BYTES = 3 * PANEL_BYTES + ATOM_BYTES; /* A, two panels of B; to begin at an atom */

    template <int COUNT> static S1F_DEVICE void store(const arguments &p, const float (&d)[COUNT])
    {
        S1F_UNROLL
        for (int i = 0; i < COUNT; i++)
            global_store(p.out + thread_index() * COUNT + i, d[i]);
    }

    static S1F_DEVICE void run(const arguments &p)
    {
        const uint32_t a = (shared_base() + ATOM_BYTES - 1) / ATOM_BYTES * ATOM_BYTES, b = a + PANEL_BYTES;
        const int columns = p.probe == TWO_PANELS ? 2 * SIZE : SIZE;
        copy_tile<SIZE, SIZE, THREADS>(a, p.a, SIZE, SIZE);
        copy_tile<SIZE, SIZE, THREADS>(b, p.b, columns, SIZE);
        if (p.probe == TWO_PANELS)
            copy_tile<SIZE, SIZE, THREADS>(b + PANEL_BYTES, p.b + SIZE, columns, SIZE);
        copy_async_commit();
        copy_async_wait<0>();
        fence_proxy();
        block_barrier();

        float d[32] = {}, wide[64] = {};
        switch (p.probe) {
        case BOTH_BY_ROWS:
            begin_products();
            S1F_UNROLL
            for (int k = 0; k < SIZE; k += 16)
                multiply<0>(d, describe(a + k * 2, 0), describe(b + k * 2, 0));
            end_products();
            store(p, d);
            break;
        case SECOND_BY_COLUMNS:
            begin_products();
            S1F_UNROLL
            for (int k = 0; k < SIZE; k += 16)
                multiply<1>(d, describe(a + k * 2, 0), describe(b + k * SIZE * 2, 0));
            end_products();
            store(p, d);
            break;
        case FIRST_IN_REGISTERS: {
            uint32_t factors[SIZE / 16][4];
            S1F_UNROLL
            for (int k = 0; k < SIZE / 16; k++)
                load_matrices(factors[k], a + matrix_rows<SIZE>(warp_index() * 16, k * 2));
            begin_products();
            S1F_UNROLL
            for (int k = 0; k < SIZE / 16; k++)
                multiply<1>(d, factors[k], describe(b + k * 16 * SIZE * 2, 0));
            end_products();
            store(p, d);
            break;
        }
        case TWO_PANELS:
            begin_products();
            S1F_UNROLL
            for (int k = 0; k < SIZE; k += 16)
                multiply<1>(wide, describe(a + k * 2, 0), describe(b + k * SIZE * 2, PANEL_BYTES));
            end_products();
            store(p, wide);
            break;
        }
    }
};

} // namespace s1f

S1F_KERNEL(s1f_warpgroup_probes, s1f::warpgroup_probes)

static const s1f_cuda_kernel kernels[] = {
    {"s1f_warpgroup_probes", S1F_BFLOAT16, 0, 0, 0, 4, 0, 0, s1f::warpgroup_probes::SHARED_BYTES,
     S1F_CUDA_SHARED_99_KB},
};

static int64_t scratch_bytes(const void *arguments, int32_t kernel)
{
    (void)arguments, (void)kernel;
    return 0;
}

static int32_t launch_probe(const void *arguments, int32_t kernel, void *stream)
{
    (void)kernel;
    const s1f::warpgroup_probes::arguments &p = *(const s1f::warpgroup_probes::arguments *)arguments;
    return s1f::launch(s1f_warpgroup_probes, {1, 1, 1}, s1f::warpgroup_probes::THREADS,
                       s1f::warpgroup_probes::SHARED_BYTES, p, stream);
}

S1F_CUDA_OPERATION(warpgroup_probes, kernels, scratch_bytes, launch_probe, s1f::error_text);
