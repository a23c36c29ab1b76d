// Every packed type's header, and the proof that it agrees with types.def.
#pragma once
#include "quant/iq1_m.h"
#include "quant/iq1_s.h"
#include "quant/iq2_s.h"
#include "quant/iq2_xs.h"
#include "quant/iq2_xxs.h"
#include "quant/iq3_s.h"
#include "quant/iq3_xxs.h"
#include "quant/iq4_nl.h"
#include "quant/iq4_xs.h"
#include "quant/mxfp4.h"
#include "quant/nvfp4.h"
#include "quant/q1_0.h"
#include "quant/q2_0.h"
#include "quant/q2_k.h"
#include "quant/q3_k.h"
#include "quant/q4_0.h"
#include "quant/q4_1.h"
#include "quant/q4_k.h"
#include "quant/q5_0.h"
#include "quant/q5_1.h"
#include "quant/q5_k.h"
#include "quant/q6_k.h"
#include "quant/q8_0.h"
#include "quant/tq1_0.h"
#include "quant/tq2_0.h"

#define REFLEX_IF_plain(...)
#define REFLEX_IF_other(...)
#define REFLEX_IF_packed(...) __VA_ARGS__

REFLEX_QUANT_BEGIN

#define REFLEX_TYPE(name, id, values, bytes, kind)                                    \
  REFLEX_IF_##kind(static_assert(name::kValues == values && values % 32 == 0);        \
                   static_assert(name::kScaleEvery == 16 || name::kScaleEvery == 32); \
                   static_assert(sizeof(name::Block) == bytes && alignof(name::Block) == 1);)
#include "quant/types.def"
#undef REFLEX_TYPE

REFLEX_QUANT_END
