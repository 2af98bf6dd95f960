// SPDX-License-Identifier: Apache-2.0
// FlashInfer's header of this name drags in its build; the kernels log nothing.
#pragma once
