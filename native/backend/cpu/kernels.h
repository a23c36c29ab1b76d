// What a program asks of an instruction set: one table of functions per set, all plain pointers
// and numbers, so that a kernel file shares no code with the rest of the program.
//
// Letters as in backend.h. `act` is a block of prepared activations: rows of f32, or of int8 with
// scales, laid out as the set's own matmul reads them. Rows are independent: whatever thread
// computes a row, and beside however many others, it adds in the same order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace reflex::cpu {

/// How activations are laid out for a matmul.
enum class Form : uint8_t {
  row_f32,    ///< (R, n_in) f32, few rows
  tile_f32,   ///< tiles of rows side by side, f32, many rows
  row_i8,     ///< (R) rows of int8 with a scale per 32, few rows
  tile_i8,    ///< tiles of rows side by side, int8
  row_super,  ///< row_i8 in the order of 256-value super-blocks
};
inline constexpr int kForms = 5;

/// y[r * ldy + j - begin] = W[j] . x[r] for j in [begin, end), r in [0, R).
struct MatmulArgs {
  uint32_t type = 0;           ///< GGML type id of W
  const uint8_t* w = nullptr;  ///< (n_out, n_in): row j at w + j * row_bytes, unaligned
  size_t row_bytes = 0;
  int32_t n_in = 0;
  Form form = Form::row_f32;
  const uint8_t* act = nullptr;  ///< as prepare() left it
  int32_t n_rows = 0;            ///< R
  float* y = nullptr;
  size_t ldy = 0;
  uint8_t* scratch = nullptr;  ///< matmul_scratch() bytes, 64-aligned, this thread's own
};

/// Attention of query rows against the slots that they see.
struct AttentionArgs {
  const float* q = nullptr;  ///< query i at q + i * ldq: (H, hd)
  size_t ldq = 0;
  float* out = nullptr;  ///< out + i * ldo: (H, hd_v)
  size_t ldo = 0;
  const uint8_t* k = nullptr;  ///< state: (G, hd) of slot s at value s * ldk, f16 or f32
  const uint8_t* v = nullptr;  ///< state: (G, hd_v) of slot s at value s * ldv
  size_t ldk = 0, ldv = 0;
  bool f16 = false;
  int32_t n_heads = 0, n_kv_heads = 0, head_dim = 0, v_head_dim = 0;
  float scale = 1.0f;
  const int32_t* row_of = nullptr;  ///< query i is pass row row_of[i]; nullptr: row i
  const int32_t* prefix = nullptr;  ///< Visibility of the pass, by row
  const int32_t* extra = nullptr;
  const int32_t* extra_begin = nullptr;
};

/// Pages whose translations are asked for together, a batch ahead (kernels/stream.h).
inline constexpr size_t kPage = 4096;
inline constexpr size_t kPageBatch = 32 * kPage;

struct Kernels {
  const char* name;  ///< "portable", "avx2", "avx512vnni"

  /// The form for R rows against a type; exact: f32 whatever the type.
  Form (*form)(uint32_t type, int32_t n_in, int32_t n_rows, bool exact);
  /// Bytes of R prepared rows of n_in values.
  size_t (*act_bytes)(Form form, int32_t n_in, int32_t n_rows);
  /// Rows per unit of preparation: prepare() may be split over threads at multiples of it.
  int32_t (*act_unit)(Form form);
  /// Prepares rows [begin, end) of R into act; row begin + i lies at x + i * ldx.
  void (*prepare)(Form form, const float* x, size_t ldx, int32_t n_in, int32_t n_rows, int32_t begin,
                  int32_t end, uint8_t* act);
  /// The prepared row r of a row_* form, usable as act with R = 1.
  const uint8_t* (*act_row)(Form form, const uint8_t* act, int32_t n_in, int32_t r);
  size_t (*matmul_scratch)(int32_t n_in, int32_t n_rows);
  void (*matmul)(const MatmulArgs& args, int32_t begin, int32_t end);

  /// y = x * rsqrt(mean(x^2) + eps) * w, over groups of `group` values of each row; x, y (rows, n),
  /// w (group).
  void (*rms_norm_rows)(const float* x, const float* w, float eps, int32_t group, int32_t n, int32_t rows,
                        float* y);
  /// Rotates n_heads heads of hd values in place; cs: n_rot / 2 cosines, then n_rot / 2 sines.
  void (*rope)(float* x, const float* cs, int32_t n_heads, int32_t head_dim, int32_t n_rot, bool adjacent);
  void (*add)(const float* a, const float* b, int32_t n, float* y);
  void (*swiglu)(const float* gate, const float* up, int32_t n, float* y);
  void (*to_f16)(const float* x, int32_t n, uint16_t* y);

  /// Floats of scratch for attention over q_rows query rows.
  size_t (*attention_scratch)(const AttentionArgs& args, int32_t q_rows);
  /// Heads [kv_begin, kv_end) of query rows [q_begin, q_end).
  void (*attention)(const AttentionArgs& args, int32_t q_begin, int32_t q_end, int32_t kv_begin,
                    int32_t kv_end, float* scratch);
  /// For a few rows over a long context: floats of one part's result; 0 where there are too many rows.
  size_t (*attention_part_floats)(const AttentionArgs& args, int32_t rows);
  /// Rows [0, rows), all heads, over slots [begin, end) of their prefixes and, in the last part, their
  /// branches.
  void (*attention_part)(const AttentionArgs& args, int32_t rows, int32_t begin, int32_t end, bool last,
                         float* part, float* scratch);
  /// The output of one key head from all parts, which lie one after another and are used up.
  void (*attention_merge)(const AttentionArgs& args, int32_t rows, int32_t kv_head, float* parts,
                          int32_t n_parts);

  /// max over x (n), NaN ignored; -inf when there is nothing else.
  float (*max_value)(const float* x, int32_t n);
  /// sum exp(x - shift), in double; NaN counts as 0.
  double (*sum_exp)(const float* x, int32_t n, float shift);
  /// y = exp((x - shift) * scale), NaN as 0; in place or not.
  void (*exp_scaled)(const float* x, int32_t n, float shift, float scale, float* y);
};

namespace portable {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512vnni {
const Kernels& kernels();
}

}  // namespace reflex::cpu
