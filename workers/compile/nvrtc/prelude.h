// What nvcc's text has of its headers and its host compiler, and NVRTC's has not. It stands before every file.
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
#define __builtin_memcpy memcpy
#define __builtin_huge_valf() __int_as_float(0x7f800000)
