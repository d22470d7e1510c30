// linear_fp8 for nine and more rows, chunks side by side: definition and operands as in kernel.cu, inputs as in split.cuh
// grid tiles of weights * tiles of rows * parts blocks, in clusters of parts; block and shared memory: split.rs
#include "split.cuh"

// The name ends with the block's weight rows and input rows; `whole` has all chunks in one block.
SPLIT_LINEAR(linear_fp8_split_64_32, TileFp8, 512, 4, 1, 32, 8, 8, true, true, false, false, true, 2)
SPLIT_LINEAR(linear_fp8_split_192_32, TileFp8, 512, 12, 1, 32, 10, 10, true, true, false, false, true, 1)
SPLIT_LINEAR(linear_fp8_split_64_64, TileFp8, 512, 4, 1, 64, 5, 7, false, true, false, false, false, 3)
SPLIT_LINEAR(linear_fp8_split_128_64, TileFp8, 512, 8, 1, 64, 9, 8, false, true, false, false, true, 1)
SPLIT_LINEAR(linear_fp8_split_192_64, TileFp8, 512, 12, 1, 64, 9, 8, false, true, false, false, false, 1)
SPLIT_LINEAR(linear_fp8_whole_256_64, TileFp8, 512, 8, 2, 64, 8, 8, false, false, false, true, false, 1)
SPLIT_LINEAR(linear_fp8_split_64_128, TileFp8, 512, 4, 1, 128, 5, 7, false, true, false, false, false, 2)
SPLIT_LINEAR(linear_fp8_split_192_128, TileFp8, 512, 12, 1, 128, 7, 8, false, true, false, false, false, 1)
SPLIT_LINEAR(linear_fp8_whole_192_128, TileFp8, 512, 12, 1, 128, 5, 4, false, false, true, false, false, 1)
