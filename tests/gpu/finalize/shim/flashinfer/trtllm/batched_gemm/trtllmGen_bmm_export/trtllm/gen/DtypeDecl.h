// SPDX-License-Identifier: Apache-2.0
// The names of data types that the finalize kernels use. FlashInfer downloads the
// header of this name; nothing of the arithmetic is in it.
#pragma once

namespace batchedGemm::trtllm::gen {

enum class Dtype { Bfloat16, E2m1, E4m3, Fp16, Fp32 };

}  // namespace batchedGemm::trtllm::gen
