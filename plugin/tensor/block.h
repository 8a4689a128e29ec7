/* What the kernel sources share: conversion of arrays in steps, and the raw non-temporal copy.
 *
 * A step converts one array to another of a different element type; a chain is the at most three steps that
 * lead from one dtype to another. The files that use a chain feed it blocks of at most BLOCK elements, so
 * that what lies between two steps stays in the L1 cache.
 */
#ifndef FSDP_TENSOR_BLOCK_H
#define FSDP_TENSOR_BLOCK_H

#include "tensor/dtype.h"

#define BLOCK 1024        /* elements */
#define BLOCK_MAX_SIZE 16 /* bytes of the largest element */

typedef void (*step_fn)(void *dst, const void *src, size_t n);

struct chain {
    int n; /* 0: the types have the same representation */
    step_fn step[3];
    size_t size[3]; /* bytes of one element of what the step writes */
};

struct chain chain_make(enum dtype from, enum dtype to);

/* n <= BLOCK, unless the chain has one step. An empty chain copies nothing: the caller reads src itself. */
void chain_run(const struct chain *chain, void *dst, const void *src, size_t n);

/* Whether the processor converts f16 (F16C on x86-64, with AVX). */
int cpu_has_f16c(void);

/* memcpy with non-temporal stores and without the closing fence, which is copy_stream_end. */
void copy_stream(void *dst, const void *src, size_t bytes);
void copy_stream_end(void);

/* Elements in the block that starts at dst, of n left: shorter at first, so that later ones start at a cache
 * line. */
size_t block_length(const void *dst, size_t size, size_t n);

#endif
