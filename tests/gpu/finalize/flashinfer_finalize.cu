// SPDX-License-Identifier: Apache-2.0
// FlashInfer's own finalize kernels behind a C function. FLASHINFER_DEV_KERNEL names
// its source file, which is compiled as it is.
#include FLASHINFER_DEV_KERNEL

#include <exception>

namespace moe::dev::finalize {

// finalize::run chooses between the kernels by the size of the batch; here the caller
// does. The launches are FlashInfer's.
static void run_scalar(Data const& data, void* stream) {
  dim3 blocks((data.hiddenDim + 255) / 256, std::min(8192, data.numTokens));
  LAUNCH_TOPK_EXPW(data, finalizeKernel, blocks, 256, 0, stream);
}

static void run_vector(Data const& data, void* stream) {
  LAUNCH_TOPK_EXPW(data, finalizeKernelVecLoad, data.numTokens, FINALIZE_THREADS_PER_BLOCK, 0,
                   stream);
}

}  // namespace moe::dev::finalize

// Returns 0, or 1 when FlashInfer threw or the launch failed.
//   kernel: 0 as finalize::run chooses, 1 scalar, 2 vector.
//   half: elements are bfloat16 (0) or float16 (1); bf16_weights: float32 (0) or bfloat16 (1).
//   rows (num_rows, padded), weights (tokens, top_k), index int32 (tokens, top_k),
//   out (tokens, hidden): contiguous, on the current device.
extern "C" int flashinfer_finalize(int kernel, int half, int bf16_weights, void* rows,
                                   void* weights, int32_t* index, void* out, int tokens, int top_k,
                                   int hidden, int padded, void* stream) {
  namespace finalize = moe::dev::finalize;
  using finalize::tg::Dtype;
  finalize::Data data{};
  data.mDtypeElt = half ? Dtype::Fp16 : Dtype::Bfloat16;
  data.mDtypeExpW = bf16_weights ? Dtype::Bfloat16 : Dtype::Fp32;
  data.inPtr = rows;
  data.outPtr = out;
  data.expertWeightsPtr = weights;
  data.expandedIdxToPermutedIdx = index;
  data.numTokens = tokens;
  data.topK = top_k;
  data.hiddenDim = hidden;
  data.hiddenDimPadded = padded;
  try {
    if (kernel == 0) {
      finalize::run(data, stream);
    } else if (kernel == 1) {
      finalize::run_scalar(data, stream);
    } else {
      finalize::run_vector(data, stream);
    }
  } catch (std::exception const& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
