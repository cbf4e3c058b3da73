/* sm80_tile.cuh - rows of 16-bit elements in shared memory, as copies write and ldmatrix reads them.
 *
 * A row has COLUMNS elements, COLUMNS / 8 chunks of 16 bytes. Chunk c of row r lies at chunk c ^ (r % 8) of its row: so
 * eight rows' chunks of one column, which ldmatrix reads at once, lie in different banks. */
#ifndef S1F_CUDA_SM80_TILE_CUH
#define S1F_CUDA_SM80_TILE_CUH

#include "sm80_primitives.cuh"

namespace s1f
{

enum { CHUNK_ELEMENTS = 8 };

/* Opaque, so that loops keep nothing that follows from them in registers, which are short. */
S1F_DEVICE int lane_index()
{
    return (int)(opaque((uint32_t)thread_index()) % WARP_SIZE);
}

S1F_DEVICE int warp_index()
{
    return (int)(opaque((uint32_t)thread_index()) / WARP_SIZE);
}

template <int COLUMNS> S1F_DEVICE uint32_t tile_offset(int row, int column_chunk)
{
    return (uint32_t)(row * COLUMNS * 2 + ((column_chunk ^ (row & 7)) * CHUNK_BYTES));
}

/* A lane points load_matrices here for a 16 x 16 corner of a tile, at a row and a chunk that are multiples of 16 and 2.
 *
 * matrix_rows: matrices 0 and 1 are rows 0..7 and 8..15 of the first 8 columns, 2 and 3 of the next 8. A operand of a
 * tile; transposed, two B operands (r[0], r[1] and r[2], r[3]) of a tile that has a row per row of B. */
template <int COLUMNS> S1F_DEVICE uint32_t matrix_rows(int row, int column_chunk)
{
    const int lane = lane_index();
    return tile_offset<COLUMNS>(row + lane % 16, column_chunk + lane / 16);
}

/* matrix_columns: matrices 0 and 1 are the first and the next 8 columns of rows 0..7, 2 and 3 of rows 8..15. Two B
 * operands of a tile that has a row per column of B. */
template <int COLUMNS> S1F_DEVICE uint32_t matrix_columns(int row, int column_chunk)
{
    const int lane = lane_index();
    return tile_offset<COLUMNS>(row + lane % 8 + lane / 16 * 8, column_chunk + lane / 8 % 2);
}

/* Begins to copy ROWS rows that lie row_stride elements apart, by all THREADS of the block; zeros for those from
 * num_rows on, which are not read. */
template <int ROWS, int COLUMNS, int THREADS, typename Element>
S1F_DEVICE void copy_tile(uint32_t shared, const Element *global, int64_t row_stride, int num_rows)
{
    constexpr int CHUNKS = COLUMNS / CHUNK_ELEMENTS, ROWS_AT_ONCE = THREADS / CHUNKS;
    static_assert(THREADS % CHUNKS == 0 && ROWS % ROWS_AT_ONCE == 0, "each thread copies as many chunks");
    const uint32_t thread = opaque((uint32_t)thread_index());
    const int first_row = (int)(thread / CHUNKS), column_chunk = (int)(thread % CHUNKS);
    const Element *source = global + first_row * row_stride + column_chunk * CHUNK_ELEMENTS;
    S1F_UNROLL
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
        const int row = first_row + i * ROWS_AT_ONCE;
        copy_async_16(shared + tile_offset<COLUMNS>(row, column_chunk), source, row < num_rows);
        source += ROWS_AT_ONCE * row_stride;
    }
}

} // namespace s1f

#endif
