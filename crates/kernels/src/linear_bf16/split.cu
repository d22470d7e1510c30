// linear_bf16 for nine and more rows, chunks side by side: definition and operands as in kernel.cu, inputs as in split.cuh
// grid tiles of weights * tiles of rows * parts blocks, in clusters of parts; block and shared memory: split.rs
#include "split.cuh"

// The name ends with the block's weight rows and input rows.
SPLIT_LINEAR(linear_bf16_split_64_32, TileBf16, 1024, 4, 32, 8, 8, true, true, 2)
SPLIT_LINEAR(linear_bf16_split_128_32, TileBf16, 1024, 8, 32, 8, 8, true, true, 1)
SPLIT_LINEAR(linear_bf16_split_64_64, TileBf16, 1024, 4, 64, 8, 10, false, false, 1)
SPLIT_LINEAR(linear_bf16_split_128_64, TileBf16, 1024, 8, 64, 8, 7, false, true, 1)
SPLIT_LINEAR(linear_bf16_split_64_128, TileBf16, 1024, 4, 128, 8, 8, false, false, 1)
SPLIT_LINEAR(linear_bf16_split_128_128, TileBf16, 1024, 8, 128, 6, 7, false, false, 1)
