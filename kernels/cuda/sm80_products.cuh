/* sm80_products.cuh - products of matrices that lie in tiles (sm80_tile.cuh) or in registers, a warp's share of them.
 *
 * d[i][j] is the 16 x 8 corner at row 16 i, column 8 j; a[i][k] the 16 x 16 corner of the first factor at row 16 i,
 * depth 16 k. Each adds to d. */
#ifndef S1F_CUDA_SM80_PRODUCTS_CUH
#define S1F_CUDA_SM80_PRODUCTS_CUH

#include "sm80_tile.cuh"

namespace s1f
{

/* The address of the corner that lies `rows` below and `columns` right, multiples of 8, of the one at `address`
 * in a tile of COLUMNS columns that begins at a multiple of 256 bytes; `columns` must have no bit in common with the
 * column of that one, so that chunks, which lie swizzled, are exchanged by an exclusive or. */
template <int COLUMNS> S1F_DEVICE uint32_t corner_at(uint32_t address, int rows, int columns)
{
    return (address ^ (uint32_t)(columns * 2)) + (uint32_t)(rows * COLUMNS * 2);
}

/* One step in depth by two 8-column corners of the second factor, as one load gave them. */
template <typename Element, int ROWS, int COLUMNS>
S1F_DEVICE void multiply_step(float (&d)[ROWS][COLUMNS][4], int column, const uint32_t (&a)[ROWS][4],
                              const uint32_t (&b)[4])
{
    S1F_UNROLL
    for (int i = 0; i < ROWS; i++) {
        matrix_multiply_add<Element>(d[i][column], a[i], b[0], b[1]);
        matrix_multiply_add<Element>(d[i][column + 1], a[i], b[2], b[3]);
    }
}

/* d += A B^T over DEPTH columns of both: rows of A from a_row, of B from b_row. */
template <typename Element, int DEPTH, int ROWS, int COLUMNS>
S1F_DEVICE void multiply_rows(float (&d)[ROWS][COLUMNS][4], uint32_t a_tile, int a_row, uint32_t b_tile, int b_row)
{
    const uint32_t a_at = opaque(a_tile + matrix_rows<DEPTH>(a_row, 0));
    const uint32_t b_at = opaque(b_tile + matrix_columns<DEPTH>(b_row, 0));
    S1F_UNROLL
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t a[ROWS][4];
        S1F_UNROLL
        for (int i = 0; i < ROWS; i++)
            load_matrices(a[i], corner_at<DEPTH>(a_at, i * 16, k * 16));
        S1F_UNROLL
        for (int j = 0; j < COLUMNS; j += 2) {
            uint32_t b[4];
            load_matrices(b, corner_at<DEPTH>(b_at, j * 8, k * 16));
            multiply_step<Element>(d, j, a, b);
        }
    }
}

/* The factor A of the above, from a_row on, for as many products as it stays the same. */
template <int DEPTH, int STEPS, int ROWS>
S1F_DEVICE void load_factors(uint32_t (&a)[STEPS][ROWS][4], uint32_t a_tile, int a_row)
{
    const uint32_t a_at = a_tile + matrix_rows<DEPTH>(a_row, 0);
    S1F_UNROLL
    for (int k = 0; k < STEPS; k++) {
        S1F_UNROLL
        for (int i = 0; i < ROWS; i++)
            load_matrices(a[k][i], corner_at<DEPTH>(a_at, i * 16, k * 16));
    }
}

template <typename Element, int STEPS, int ROWS, int COLUMNS>
S1F_DEVICE void multiply_rows(float (&d)[ROWS][COLUMNS][4], const uint32_t (&a)[STEPS][ROWS][4], uint32_t b_tile,
                              int b_row)
{
    const uint32_t b_at = opaque(b_tile + matrix_columns<STEPS * 16>(b_row, 0));
    S1F_UNROLL
    for (int k = 0; k < STEPS; k++) {
        S1F_UNROLL
        for (int j = 0; j < COLUMNS; j += 2) {
            uint32_t b[4];
            load_matrices(b, corner_at<STEPS * 16>(b_at, j * 8, k * 16));
            multiply_step<Element>(d, j, a[k], b);
        }
    }
}

/* d += A B, the depth being rows of B from b_row, 16 for each step, and its columns from b_column, a multiple of those
 * of d. B_COLUMNS: of the tile. */
template <typename Element, int B_COLUMNS, int ROWS, int STEPS, int COLUMNS>
S1F_DEVICE void multiply_columns(float (&d)[ROWS][COLUMNS][4], const uint32_t (&a)[STEPS][ROWS][4], uint32_t b_tile,
                                 int b_row, int b_column)
{
    const uint32_t b_at = opaque(b_tile + matrix_rows<B_COLUMNS>(b_row, b_column / CHUNK_ELEMENTS));
    S1F_UNROLL
    for (int k = 0; k < STEPS; k++) {
        S1F_UNROLL
        for (int j = 0; j < COLUMNS; j += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, corner_at<B_COLUMNS>(b_at, k * 16, j * 8));
            multiply_step<Element>(d, j, a[k], b);
        }
    }
}

/* d += A^T B over DEPTH rows of both, columns from a_column and b_column, multiples of the rows and columns of d. */
template <typename Element, int DEPTH, int A_COLUMNS, int B_COLUMNS, int ROWS, int COLUMNS>
S1F_DEVICE void multiply_transposed(float (&d)[ROWS][COLUMNS][4], uint32_t a_tile, int a_column, uint32_t b_tile,
                                    int b_column)
{
    const uint32_t a_at = opaque(a_tile + matrix_columns<A_COLUMNS>(0, a_column / CHUNK_ELEMENTS));
    const uint32_t b_at = opaque(b_tile + matrix_rows<B_COLUMNS>(0, b_column / CHUNK_ELEMENTS));
    S1F_UNROLL
    for (int k = 0; k < DEPTH / 16; k++) {
        uint32_t a[ROWS][4];
        S1F_UNROLL
        for (int i = 0; i < ROWS; i++)
            load_matrices_transposed(a[i], corner_at<A_COLUMNS>(a_at, k * 16, i * 16));
        S1F_UNROLL
        for (int j = 0; j < COLUMNS; j += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, corner_at<B_COLUMNS>(b_at, k * 16, j * 8));
            multiply_step<Element>(d, j, a, b);
        }
    }
}

/* d, rounded, as first factors whose depth is the columns of d: a lane already has what they want of it. */
template <typename Element, int ROWS, int COLUMNS>
S1F_DEVICE void round_to_factors(uint32_t (&a)[COLUMNS / 2][ROWS][4], const float (&d)[ROWS][COLUMNS][4])
{
    S1F_UNROLL
    for (int k = 0; k < COLUMNS / 2; k++) {
        S1F_UNROLL
        for (int i = 0; i < ROWS; i++) {
            S1F_UNROLL
            for (int word = 0; word < 4; word++)
                a[k][i][word] =
                    pack<Element>(d[i][k * 2 + word / 2][word % 2 * 2], d[i][k * 2 + word / 2][word % 2 * 2 + 1]);
        }
    }
}

/* Stores factors to a tile, from a row on that is a multiple of 16 and a column that is one of theirs. */
template <int TILE_COLUMNS, int STEPS, int ROWS>
S1F_DEVICE void store_factors(uint32_t tile, int row, int column, const uint32_t (&a)[STEPS][ROWS][4])
{
    const int lane = lane_index();
    const uint32_t at =
        opaque(tile + tile_offset<TILE_COLUMNS>(row + lane / 4, column / CHUNK_ELEMENTS) + lane % 4 * 4);
    S1F_UNROLL
    for (int k = 0; k < STEPS; k++) {
        S1F_UNROLL
        for (int i = 0; i < ROWS; i++) {
            S1F_UNROLL
            for (int word = 0; word < 4; word++)
                shared_store_4(corner_at<TILE_COLUMNS>(at, i * 16 + word % 2 * 8, k * 16 + word / 2 * 8),
                               a[k][i][word]);
        }
    }
}

} // namespace s1f

#endif
