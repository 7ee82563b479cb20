# NCCL and the CUDA runtime out of the packages that PyTorch's wheel brings, as the imported target `shardproof::nccl`; where
# they are missing there is no such target. Neither a CUDA compiler nor a driver is needed to build.
option(SHARDPROOF_NCCL "Build the NCCL backend where its headers and libraries are found" ON)
file(GLOB _nccl_dirs "${SHARDPROOF_VENV}/lib/python3.*/site-packages/nvidia/nccl")
file(GLOB _cudart_dirs "${SHARDPROOF_VENV}/lib/python3.*/site-packages/nvidia/cu1[23]")
if(SHARDPROOF_NCCL AND _nccl_dirs AND _cudart_dirs)
  list(GET _nccl_dirs 0 _nccl_dir)
  list(GET _cudart_dirs 0 _cudart_dir)
  file(GLOB _nccl_library "${_nccl_dir}/lib/libnccl.so.2")
  file(GLOB _cudart_library "${_cudart_dir}/lib/libcudart.so.1[23]")
  if(_nccl_library AND _cudart_library AND EXISTS "${_nccl_dir}/include/nccl.h" AND
     EXISTS "${_cudart_dir}/include/cuda_runtime_api.h")
    add_library(shardproof_nccl_library INTERFACE)
    add_library(shardproof::nccl ALIAS shardproof_nccl_library)
    target_include_directories(shardproof_nccl_library SYSTEM INTERFACE "${_nccl_dir}/include" "${_cudart_dir}/include")
    target_link_libraries(shardproof_nccl_library INTERFACE "${_nccl_library}" "${_cudart_library}")
  endif()
endif()
