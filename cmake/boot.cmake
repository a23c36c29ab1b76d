# reflex_boot: starts the CUDA driver (dlopen, no toolkit needed). _boot: the same as a Python
# module of its own, the command's first import; it links nothing but the C library.
add_library(reflex_boot STATIC native/boot/boot.cpp native/boot/floor.cpp)
target_link_libraries(reflex_boot PUBLIC reflex_base)

if(REFLEX_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
  Python_add_library(_boot MODULE native/boot/module.cpp)
  set_target_properties(_boot PROPERTIES SUFFIX ".abi3.so")
  target_compile_definitions(_boot PRIVATE REFLEX_WITH_CUDA=$<BOOL:${REFLEX_HAVE_CUDA}>)
  target_link_libraries(_boot PRIVATE reflex_boot)
  # A sanitizer's runtime needs the shared C++ library.
  if(NOT REFLEX_SANITIZE)
    target_link_options(_boot PRIVATE -static-libgcc -static-libstdc++ -Wl,--exclude-libs,ALL)
  endif()
  install(TARGETS _boot LIBRARY DESTINATION reflex_worker)
endif()
