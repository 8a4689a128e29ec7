/* Runs a suite without Criterion's own runner, which can't start under the thread sanitizer (it wants memory
 * at addresses that the sanitizer has taken). Each test in a process of its own, one after the other; suites'
 * and tests' init, fini, timeout, expected signal and exit code as Criterion has them; no parameterised
 * tests. Linked into the suites of such builds in place of Criterion's functions. An argument: only tests
 * whose "suite/name" holds it. */
#include <criterion/criterion.h>
#include <criterion/event.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SKIPPED 77 /* meson's word for it */

extern struct criterion_test *__start_cr_tst[], *__stop_cr_tst[];
extern struct criterion_suite *__start_cr_sts[] __attribute__((weak)), *__stop_cr_sts[] __attribute__((weak));

static const struct criterion_test *current;
static const struct criterion_suite *current_suite;
static int failed;

static void call(void (*fn)(void))
{
    if (fn) fn();
}

void criterion_internal_test_setup(void)
{
    if (current_suite && current_suite->data) call(current_suite->data->init);
    call(current->data->init);
}

void criterion_internal_test_main(void (*fn)(void))
{
    fn();
}

void criterion_internal_test_teardown(void)
{
    call(current->data->fini);
    if (current_suite && current_suite->data) call(current_suite->data->fini);
}

void criterion_send_assert(struct criterion_assert_stats *stats)
{
    if (stats->passed) return;
    failed = 1;
    if (current) fprintf(stderr, "%s/%s: ", current->category, current->name);
    fprintf(stderr, "%s:%u: %s\n", stats->file, stats->line, stats->message);
}

static _Noreturn void leave(int status)
{
    fflush(NULL);
    exit(status);
}

void criterion_abort_test(void)
{
    if (current) criterion_internal_test_teardown();
    leave(1);
}

void criterion_continue_test(void) {}

void criterion_skip_test(const char *format, ...)
{
    leave(SKIPPED);
}

static int run(const struct criterion_test *test)
{
    double timeout = test->data->timeout;
    current = test;
    current_suite = NULL;
    for (struct criterion_suite **s = __start_cr_sts; s && s < __stop_cr_sts; s++)
        if (strcmp((*s)->name, test->category) == 0) current_suite = *s;
    if (timeout == 0 && current_suite && current_suite->data) timeout = current_suite->data->timeout;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm((unsigned)(timeout * 4));
        test->test();
        leave(failed);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == SKIPPED) return SKIPPED;
    if (test->data->signal) return !(WIFSIGNALED(status) && WTERMSIG(status) == test->data->signal);
    return !(WIFEXITED(status) && WEXITSTATUS(status) == test->data->exit_code);
}

/* A suite may bring its own. */
__attribute__((weak)) int main(int argc, char **argv)
{
    int bad = 0, ran = 0;
    for (struct criterion_test **t = __start_cr_tst; t < __stop_cr_tst; t++) {
        char name[256];
        snprintf(name, sizeof name, "%s/%s", (*t)->category, (*t)->name);
        if (!*t || (*t)->data->disabled || (argc > 1 && !strstr(name, argv[argc - 1]))) continue;
        int result = run(*t);
        ran++;
        bad += result && result != SKIPPED;
        printf("%s %s\n", result == SKIPPED ? "[SKIP]" : result ? "[FAIL]" : "[PASS]", name);
    }
    printf("%d tests, %d failed\n", ran, bad);
    return bad || !ran;
}
