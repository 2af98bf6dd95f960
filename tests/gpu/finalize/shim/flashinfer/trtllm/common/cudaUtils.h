// SPDX-License-Identifier: Apache-2.0
// FlashInfer's header of this name wants cuBLAS, which no finalize kernel uses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>
