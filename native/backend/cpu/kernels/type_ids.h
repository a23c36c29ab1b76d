// The GGML type ids by name, for code that includes none of quant's own functions.
#pragma once
#include <stdint.h>

#include "backend/cpu/kernels/isa_namespace.h"

REFLEX_ISA_BEGIN

enum TypeId : uint32_t {
#define REFLEX_TYPE(name, id, values, bytes, kind) kType##name = id,
#include "quant/types.def"
#undef REFLEX_TYPE
};

REFLEX_ISA_END
