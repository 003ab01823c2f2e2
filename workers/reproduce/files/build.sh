#!/bin/sh
# Builds what is in this folder, with the very commands of the service that verified it. NVCC and CXX name the compilers.
#
#   sh build.sh device     kernel.cu -> build/group.cubin
#   sh build.sh library    launch.cpp around that cubin -> build/library.so
#   sh build.sh cpu        kernel_cpu.cpp -> build/kernel_cpu.so
#   sh build.sh            all of them
set -eu
NVCC=${NVCC:-@NVCC@}
CXX=${CXX:-g++}
mkdir -p "$(dirname "$0")/build"
cd "$(dirname "$0")/build"

device() {
@DEVICE@
}

library() {
@LIBRARY@
}

cpu() {
@CPU@
}

set -x
case "${1:-all}" in
  device | library | cpu) "$1" ;;
  all)
    device
    library
    cpu
    ;;
  *)
    echo "build.sh: '$1' is no part; allowed: device, library, cpu" >&2
    exit 2
    ;;
esac
