// linear_fp8 for nine and more rows, chunks side by side: definition and operands as in kernel.cu, inputs as in split.cuh
// grid tiles of weights * tiles of rows * parts blocks, in clusters of parts; block and shared memory: split.rs
#include "split.cuh"

// The name ends with the block's weight rows and input rows.
SPLIT_LINEAR(linear_fp8_split_64_32, TileFp8, 512, 4, 32, 8, 8, true, true, 2)
SPLIT_LINEAR(linear_fp8_split_192_32, TileFp8, 512, 12, 32, 10, 10, true, true, 1)
SPLIT_LINEAR(linear_fp8_split_64_64, TileFp8, 512, 4, 64, 5, 7, false, false, 3)
SPLIT_LINEAR(linear_fp8_split_128_64, TileFp8, 512, 8, 64, 9, 8, false, true, 1)
SPLIT_LINEAR(linear_fp8_split_192_64, TileFp8, 512, 12, 64, 9, 8, false, false, 1)
SPLIT_LINEAR(linear_fp8_split_64_128, TileFp8, 512, 4, 128, 5, 7, false, false, 2)
SPLIT_LINEAR(linear_fp8_split_192_128, TileFp8, 512, 12, 128, 7, 8, false, false, 1)
