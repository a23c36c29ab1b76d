# The Python modules. _native: the core through nanobind (engine.h only).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir OUTPUT_STRIP_TRAILING_WHITESPACE
                OUTPUT_VARIABLE nanobind_ROOT)
find_package(nanobind CONFIG REQUIRED)

file(GLOB reflex_binding_sources CONFIGURE_DEPENDS native/bindings/*.cpp)
nanobind_add_module(_native STABLE_ABI NB_STATIC NOMINSIZE ${reflex_binding_sources})
target_link_libraries(_native PRIVATE reflex_engine)
install(TARGETS _native LIBRARY DESTINATION reflex_worker)

# The `reflex` command (native/launcher): lands in the environment's bin folder.
add_executable(reflex_launcher native/launcher/reflex.cpp)
target_link_libraries(reflex_launcher PRIVATE reflex_flags)
set_target_properties(reflex_launcher PROPERTIES OUTPUT_NAME reflex)
target_link_options(reflex_launcher PRIVATE -static-libgcc -static-libstdc++)
if(SKBUILD)
  install(TARGETS reflex_launcher RUNTIME DESTINATION "${SKBUILD_SCRIPTS_DIR}")
endif()
