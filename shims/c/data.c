/* The classifier's data: made up, or from a CSV file. Nothing here knows of libfsdp. */
#include "data.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

float random_uniform(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

/* Room for one more row. */
static int grow(dataset *data)
{
    float *x = realloc(data->x, ((size_t)data->rows + 1) * (size_t)data->features * sizeof(float));
    if (x != NULL) data->x = x;
    int *label = realloc(data->label, ((size_t)data->rows + 1) * sizeof(int));
    if (label != NULL) data->label = label;
    if (x != NULL && label != NULL) return 0;
    fputs("train: out of memory\n", stderr);
    return -1;
}

int dataset_make(dataset *data)
{
    enum { ROWS = 480, FEATURES = 17, CLASSES = 10 };
    float centre[CLASSES][FEATURES];
    uint32_t state = 7;
    for (int c = 0; c < CLASSES; c++)
        for (int f = 0; f < FEATURES; f++) centre[c][f] = random_uniform(&state);

    *data = (dataset){.features = FEATURES, .classes = CLASSES};
    for (; data->rows < ROWS; data->rows++) {
        if (grow(data) != 0) return -1;
        int label = (int)((state >> 16) % CLASSES);
        float *x = data->x + data->rows * FEATURES;
        for (int f = 0; f < FEATURES; f++) x[f] = centre[label][f] + 0.8f * random_uniform(&state);
        data->label[data->rows] = label;
    }
    return 0;
}

/* A line's numbers, of which the last is the class. Returns what is wrong with it, or NULL. */
static const char *add_line(dataset *data, const char *line)
{
    int commas = 0;
    for (const char *c = line; *c != '\0'; c++) commas += *c == ',';
    if (data->rows == 0) data->features = commas;
    if (commas == 0 || commas != data->features) return "another number of columns than on line 1, or only one";
    if (grow(data) != 0) return "too much data";

    char *end;
    for (int f = 0; f < data->features; f++, line = end + 1) {
        float value = strtof(line, &end);
        if (end == line || *end != ',' || !isfinite(value)) return "not a number";
        data->x[data->rows * data->features + f] = value;
    }
    long label = strtol(line, &end, 10);
    if (end == line || end[strspn(end, " \r\n")] != '\0' || label < 0 || label > 999)
        return "the last column is no class from 0 to 999";
    data->label[data->rows++] = (int)label;
    if (label >= data->classes) data->classes = (int)label + 1;
    return NULL;
}

int dataset_read(dataset *data, const char *path)
{
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        fprintf(stderr, "train: %s: %s\n", path, strerror(errno));
        return -1;
    }
    char *line = NULL;
    size_t size = 0;
    const char *wrong = NULL;
    while (wrong == NULL && getline(&line, &size, file) > 0) wrong = add_line(data, line);
    if (wrong == NULL && data->rows == 0) wrong = "no data";
    if (wrong != NULL) fprintf(stderr, "train: %s, line %d: %s\n", path, data->rows + 1, wrong);
    free(line);
    fclose(file);

    float top = 0; /* bring all features to -1 .. 1 */
    for (int i = 0; i < data->rows * data->features; i++) top = fmaxf(top, fabsf(data->x[i]));
    for (int i = 0; i < data->rows * data->features && top > 0; i++) data->x[i] /= top;
    return wrong == NULL ? 0 : -1;
}

void dataset_free(dataset *data)
{
    free(data->x);
    free(data->label);
}
