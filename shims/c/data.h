/* Data for train.c. */
#ifndef DATA_H
#define DATA_H

#include <stdint.h>

typedef struct dataset {
    int rows, features, classes;
    float *x; /* (rows, features), about -1 to 1 */
    int *label;
} dataset;

/* Clusters of random points, the same on every call. Both return 0, or -1 after saying why. */
int dataset_make(dataset *data);

/* One sample a line: numbers, and its class (0, 1, ...) last. */
int dataset_read(dataset *data, const char *path);

void dataset_free(dataset *data);

float random_uniform(uint32_t *state); /* -1 to 1 */

#endif
