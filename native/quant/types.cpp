#include "quant/types.h"

namespace reflex {

const TypeInfo* find_type(uint32_t id) {
  switch (id) {
#define REFLEX_TYPE(name, id, values, bytes, kind)                                        \
  case id: {                                                                              \
    static constexpr TypeInfo info{#name, GgmlType::name, values, bytes, TypeKind::kind}; \
    return &info;                                                                         \
  }
#include "quant/types.def"
#undef REFLEX_TYPE
    default:
      return nullptr;
  }
}

}  // namespace reflex
