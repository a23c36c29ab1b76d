// The table of this instruction set.
#include "backend/cpu/kernels/activations.h"
#include "backend/cpu/kernels/attention.h"
#include "backend/cpu/kernels/elementwise.h"
#include "backend/cpu/kernels/matmul.h"

#define REFLEX_NAME_(x) #x
#define REFLEX_NAME(x) REFLEX_NAME_(x)

REFLEX_ISA_BEGIN

const Kernels& kernels() {
  static constexpr Kernels table = {
      .name = REFLEX_NAME(REFLEX_ISA),
      .form = choose_form,
      .act_bytes = act_bytes,
      .act_unit = act_unit,
      .prepare = prepare,
      .act_row = act_row,
      .matmul_scratch = matmul_scratch,
      .matmul = matmul,
      .rms_norm_rows = rms_norm_rows,
      .rope = rope,
      .add = add,
      .swiglu = swiglu,
      .to_f16 = to_f16,
      .attention_scratch = attention_scratch,
      .attention = attention,
      .attention_part_floats = attention_part_floats,
      .attention_part = attention_part,
      .attention_merge = attention_merge,
      .max_value = max_value,
      .sum_exp = sum_exp,
      .exp_scaled = exp_scaled,
  };
  return table;
}

REFLEX_ISA_END
