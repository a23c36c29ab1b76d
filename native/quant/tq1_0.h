// TQ1_0: 256 values, base 3, one scale.          value = d * (trit - 1)
#pragma once
#include "quant/block.h"

REFLEX_QUANT_BEGIN

struct TQ1_0 {
  static constexpr int kValues = 256;
  static constexpr bool kHasMin = false;
  static constexpr int kScaleEvery = 32;

  struct Block {
    uint8_t
        qs[48];  ///< value 32n + i: trit n (of 5) of byte i < 32; value 160 + 16n + i: trit n of byte 32 + i
    uint8_t qh[4];  ///< value 240 + 4n + i: trit n (of 4) of byte i
    Half d;
  };

  /// A byte is the fraction 0.t0 t1 t2 t3 t4 in base 3, times 256 and rounded up: multiplied by
  /// 3^n its fraction starts with trit n, and another factor of 3 brings that trit out on top.
  REFLEX_HD static int8_t trit(uint8_t byte, int power_of_3) {
    const auto rest = static_cast<uint8_t>(byte * power_of_3);
    return static_cast<int8_t>((rest * 3 >> 8) - 1);
  }

  REFLEX_HD static int power_of_3(int n) { return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81; }

  REFLEX_HD static void unpack32(const Block& b, int g, int8_t* __restrict__ q, float* scale, float*) {
    scale[0] = scale[1] = to_float(b.d);
    if (g < 5) {
      const int power = power_of_3(g);
      for (int i = 0; i < 32; ++i) q[i] = trit(b.qs[i], power);
      return;
    }
    const int first = 2 * (g - 5);  // trits 0, 1; 2, 3; 4 of the last 16 bytes of qs
    const int power = power_of_3(first);
    for (int i = 0; i < 16; ++i) q[i] = trit(b.qs[32 + i], power);
    if (g < 7)
      for (int i = 0; i < 16; ++i) q[16 + i] = trit(b.qs[32 + i], 3 * power);
    else
      for (int i = 0; i < 16; ++i) q[16 + i] = trit(b.qh[i % 4], power_of_3(i / 4));
  }
};

REFLEX_QUANT_END
