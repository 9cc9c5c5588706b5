/* The collectives that MPI has, on f32: the peer of benches/benches/collectives, which measures them in the same way.
 *
 *     mpicc -O3 -o collectives collectives.c -lm
 *     mpirun -n 4 ./collectives 15 0.01 8 1024 16777216      # rows, seconds a row, sizes in bytes
 *
 * A size is that of the larger of a rank's two buffers. A time is that of one call, in a row of calls, from the first rank that
 * begins it to the last that ends it. Results are compared with their closed forms before they are timed. A line for each
 * collective and size: name, ranks, bytes, least and median in seconds.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int rank, ranks;
static size_t part;
static float *source, *target;

/* What a rank brings: small whole numbers, in which rank and index show. */
static float brought(int from, size_t index) { return (float)((from + 1) * (int)(index % 7 + 1)); }

static float total(size_t index) {
    float sum = 0;
    for (int from = 0; from < ranks; from++) sum += brought(from, index);
    return sum;
}

static float gathered(size_t index) { return brought((int)(index / part), index % part); }
static float own_total(size_t index) { return total(rank * part + index); }
static float of_root(size_t index) { return brought(0, index); }
static float own_of_root(size_t index) { return brought(0, rank * part + index); }
static float dealt(size_t index) { return brought((int)(index / part), rank * part + index % part); }
static float of_previous(size_t index) { return brought((rank + ranks - 1) % ranks, index); }
static float at_root(size_t index) { return rank == 0 ? total(index) : brought(rank, index); }

static void all_gather(void) {
    MPI_Allgather(source, (int)part, MPI_FLOAT, target, (int)part, MPI_FLOAT, MPI_COMM_WORLD);
}
static void reduce_scatter(void) {
    MPI_Reduce_scatter_block(source, target, (int)part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
static void all_reduce(void) {
    MPI_Allreduce(MPI_IN_PLACE, target, (int)part * ranks, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}
static void broadcast(void) { MPI_Bcast(target, (int)part * ranks, MPI_FLOAT, 0, MPI_COMM_WORLD); }
static void reduce(void) {
    if (rank == 0)
        MPI_Reduce(MPI_IN_PLACE, target, (int)part * ranks, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    else
        MPI_Reduce(target, NULL, (int)part * ranks, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
}
static void gather(void) {
    MPI_Gather(source, (int)part, MPI_FLOAT, target, (int)part, MPI_FLOAT, 0, MPI_COMM_WORLD);
}
static void scatter(void) {
    MPI_Scatter(source, (int)part, MPI_FLOAT, target, (int)part, MPI_FLOAT, 0, MPI_COMM_WORLD);
}
static void all_to_all(void) {
    MPI_Alltoall(source, (int)part, MPI_FLOAT, target, (int)part, MPI_FLOAT, MPI_COMM_WORLD);
}
static void send_recv(void) {
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    MPI_Sendrecv(source, (int)part * ranks, MPI_FLOAT, next, 0, target, (int)part * ranks, MPI_FLOAT, previous, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
static void barrier(void) { MPI_Barrier(MPI_COMM_WORLD); }

/* Where a collective has its elements. */
enum place { APART, IN_PLACE, NONE };

static const struct {
    const char *name;
    void (*call)(void);
    float (*expected)(size_t index);
    enum place place;
    int whole_result, root_only;
} collectives[] = {
    {"all_gather", all_gather, gathered, APART, 1, 0},
    {"reduce_scatter", reduce_scatter, own_total, APART, 0, 0},
    {"all_reduce", all_reduce, total, IN_PLACE, 1, 0},
    {"broadcast", broadcast, of_root, IN_PLACE, 1, 0},
    {"reduce", reduce, at_root, IN_PLACE, 1, 0},
    {"gather", gather, gathered, APART, 1, 1},
    {"scatter", scatter, own_of_root, APART, 0, 0},
    {"all_to_all", all_to_all, dealt, APART, 1, 0},
    {"send_recv", send_recv, of_previous, APART, 1, 0},
    {"barrier", barrier, NULL, NONE, 0, 0},
};

static void *room(size_t count) {
    void *elements = malloc(count * sizeof(float));
    if (!elements) {
        fprintf(stderr, "rank %d: out of memory for %zu elements\n", rank, count);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return elements;
}

static void fill(int at) {
    size_t whole = part * ranks;
    for (size_t index = 0; index < whole; index++) {
        source[index] = brought(rank, index);
        target[index] = collectives[at].place == IN_PLACE ? source[index] : NAN;
    }
}

static void check(int at) {
    if (collectives[at].place == NONE || (collectives[at].root_only && rank != 0)) return;
    size_t count = collectives[at].whole_result ? part * ranks : part;
    for (size_t index = 0; index < count; index++) {
        float expected = collectives[at].expected(index);
        if (target[index] != expected) {
            fprintf(stderr, "%s, %zu B, %d ranks: on rank %d, element %zu is %g, not %g\n", collectives[at].name,
                    part * ranks * sizeof(float), ranks, rank, index, target[index], expected);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
}

/* The clock that all processes of a machine share; MPI_Wtime counts from the start of each. */
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double row(int at, long calls) {
    MPI_Barrier(MPI_COMM_WORLD);
    double began = now();
    for (long call = 0; call < calls; call++) collectives[at].call();
    double ended = now();
    MPI_Allreduce(MPI_IN_PLACE, &began, 1, MPI_DOUBLE, MPI_MIN, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &ended, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return (ended - began) / (double)calls;
}

static int ascending(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

static void measure(int at, size_t size, int rows, double each) {
    part = size / sizeof(float) / ranks;
    if (part == 0) part = 1;
    source = room(part * ranks);
    target = room(part * ranks);
    fill(at);
    collectives[at].call();
    check(at);
    /* Sums of zeros stay finite, however often they are the input of the next call. */
    if (collectives[at].place == IN_PLACE) memset(target, 0, part * ranks * sizeof(float));
    long calls = lround(fmin(fmax(each / row(at, 2), 5), 10000));
    double times[1000];
    for (int index = 0; index < rows; index++) times[index] = row(at, calls);
    qsort(times, rows, sizeof(double), ascending);
    size_t bytes = collectives[at].place == NONE ? 0 : part * ranks * sizeof(float);
    if (rank == 0) printf("%s %d %zu %.9f %.9f\n", collectives[at].name, ranks, bytes, times[0], times[rows / 2]);
    free(source);
    free(target);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int rows = argc > 3 ? atoi(argv[1]) : 0;
    if (rows < 1 || rows > 1000) {
        if (rank == 0) fprintf(stderr, "usage: collectives ROWS SECONDS SIZE...   (1 to 1000 rows)\n");
        MPI_Finalize();
        return 2;
    }
    for (size_t at = 0; at < sizeof(collectives) / sizeof(*collectives); at++) {
        for (int index = 3; index < argc; index++) {
            measure((int)at, strtoull(argv[index], NULL, 10), rows, atof(argv[2]));
            if (collectives[at].place == NONE) break;
        }
    }
    MPI_Finalize();
    return 0;
}
