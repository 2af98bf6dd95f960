// SPDX-License-Identifier: Apache-2.0
// The names of scale layouts; see DtypeDecl.h.
#pragma once

namespace batchedGemm::trtllm::gen {

enum class SfLayout { Linear, R8c4, R8c16, R128c4 };

}  // namespace batchedGemm::trtllm::gen
