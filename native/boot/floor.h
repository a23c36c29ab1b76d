// The floor of a cold start on a GPU: what no start that puts a file on the card can go below. Owns: the
// measurement, in a process of its own. Refuses: knowing what the bytes mean.
#pragma once
#include <cstddef>

#include "boot/boot.h"

namespace reflex {

/// Milliseconds since the boot was started.
struct BootFloor {
  double init = 0, context = 0;  ///< cuInit and the context were there
  double bytes = 0;              ///< the last byte of the file was on the card
  size_t file_bytes = 0;
};

/// The driver, a context, room for the file on the card, and every byte of it copied there through the
/// boot's pinned ring by `threads` threads; nothing is computed. Returns false with a sentence in `message`.
bool boot_floor(reflex_boot* boot, const char* path, int threads, BootFloor& out, char* message,
                size_t message_bytes);

}  // namespace reflex
