/* The launchers' variables: who this rank is, and where its job meets. Read once, on the caller's thread.
 *
 * Who: the first of these pairs that is set. A variable set to "" counts as not set.
 *   RANK, WORLD_SIZE                              torchrun, `python -m libfsdp.run`, PyTorchJob
 *   OMPI_COMM_WORLD_RANK (or PMIX_RANK), OMPI_COMM_WORLD_SIZE    Open MPI's mpirun
 *   PMI_RANK, PMI_SIZE                            MPICH, Intel MPI, `srun --mpi=pmi2`
 *   SLURM_PROCID, SLURM_NTASKS                    srun
 * Half of a pair is an error that names the missing half. Slurm is the exception: its variables are also set
 * in the shell of an allocation, where there is one process and no rank, so half of that pair means nothing.
 *
 * Where, for more than one rank:
 *   1. FSDP_STORE, a tcp:// or file:// URL.
 *   2. MASTER_ADDR with FSDP_MASTER_PORT.
 *   3. MASTER_ADDR with MASTER_PORT. Under torchrun (TORCHELASTIC_USE_AGENT_STORE=True) the launcher itself
 *      listens on MASTER_PORT for as long as the job runs, so rank 0 can't: the port used is then
 *      MASTER_PORT + 1 (65534 when MASTER_PORT is 65535). All ranks compute the same. If that port is taken,
 *      rank 0 says so and names FSDP_MASTER_PORT; the hello keeps ranks from joining what else is there.
 *   4. None of these, all ranks on one host, and a launcher that gives the job an identity: a file
 *      named after it, in XDG_RUNTIME_DIR or /tmp. Open MPI: OMPI_COMM_WORLD_LOCAL_SIZE equals the
 *      world size; the identity is the job's number, its server's address and its random key. Slurm:
 *      SLURM_STEP_NUM_NODES is 1; the identity is job and step. This is sound because the identity is
 *      unique among running jobs, the file is private to the user (file_log.c checks owner and mode),
 *      and a file whose processes are all gone is recognised as dead. MPICH gives no identity that all
 *      ranks share: there it is an error.
 *   5. An error that names the missing variable and who sets it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "store/address.h"

static const char *variable(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static fsdp_status number(const char *name, const char *text, int64_t low, int64_t high, int64_t *out)
{
    if (store_parse_int(text, low, high, out)) return FSDP_OK;
    return err(FSDP_ERR_RENDEZVOUS,
               "the environment variable %s is '%s': expected a number from %" PRId64 " to %" PRId64, name, text, low,
               high);
}

static fsdp_status read_pair(const char *rank_name, const char *size_name, const char *launcher, int32_t *rank,
                             int32_t *world_size)
{
    const char *rank_text = variable(rank_name), *size_text = variable(size_name);
    if (!rank_text || !size_text)
        return err(FSDP_ERR_RENDEZVOUS,
                   "the environment variable %s is set but %s is not: %s sets both; set %s, or unset %s to "
                   "run as one rank",
                   rank_text ? rank_name : size_name, rank_text ? size_name : rank_name, launcher,
                   rank_text ? size_name : rank_name, rank_text ? rank_name : size_name);
    int64_t r, n;
    TRY(number(size_name, size_text, 1, STORE_WORLD_MAX, &n));
    TRY(number(rank_name, rank_text, 0, STORE_WORLD_MAX, &r));
    if (r >= n)
        return err(FSDP_ERR_RENDEZVOUS,
                   "the environment variable %s is %" PRId64 " but %s is %" PRId64 ": ranks go from 0 to %" PRId64,
                   rank_name, r, size_name, n, n - 1);
    *rank = (int32_t)r;
    *world_size = (int32_t)n;
    return FSDP_OK;
}

fsdp_status store_env_identity(enum store_launcher *launcher, int32_t *rank, int32_t *world_size)
{
    *rank = 0;
    *world_size = 1;
    if (variable("RANK") || variable("WORLD_SIZE")) {
        *launcher = LAUNCHER_TORCHRUN;
        return read_pair("RANK", "WORLD_SIZE", "torchrun", rank, world_size);
    }
    if (variable("OMPI_COMM_WORLD_RANK") || variable("OMPI_COMM_WORLD_SIZE")) {
        *launcher = LAUNCHER_OPENMPI;
        int pmix = !variable("OMPI_COMM_WORLD_RANK") && variable("PMIX_RANK");
        return read_pair(pmix ? "PMIX_RANK" : "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun", rank,
                         world_size);
    }
    if (variable("PMI_RANK") || variable("PMI_SIZE")) {
        *launcher = LAUNCHER_PMI;
        return read_pair("PMI_RANK", "PMI_SIZE", "MPICH's mpiexec", rank, world_size);
    }
    if (variable("SLURM_PROCID") && variable("SLURM_NTASKS")) {
        *launcher = LAUNCHER_SLURM;
        return read_pair("SLURM_PROCID", "SLURM_NTASKS", "srun", rank, world_size);
    }
    *launcher = LAUNCHER_NONE;
    return FSDP_OK;
}

static uint64_t mix(uint64_t hash, const char *text)
{
    if (text) hash = hash_bytes(hash, text, strlen(text));
    return hash_bytes(hash, "\xff", 1); /* so that "ab", "c" differs from "a", "bc" */
}

/* Rule 4: 1 when the job has an identity and is on this host alone. */
static int job_on_this_host(enum store_launcher launcher, int32_t world_size, uint64_t *identity)
{
    static const char *const open_mpi[] = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                                           "OMPI_MCA_orte_precondition_transports", "PMIX_SERVER_URI2",
                                           "PMIX_SERVER_URI21"};
    static const char *const slurm[] = {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"};
    const char *local = NULL;
    const char *const *names = NULL;
    size_t n = 0;
    int64_t wanted = 0, have;
    if (launcher == LAUNCHER_OPENMPI && (variable("PMIX_NAMESPACE") || variable("OMPI_MCA_ess_base_jobid"))) {
        local = variable("OMPI_COMM_WORLD_LOCAL_SIZE");
        wanted = world_size;
        names = open_mpi;
        n = sizeof open_mpi / sizeof *open_mpi;
    } else if (launcher == LAUNCHER_SLURM && variable("SLURM_JOB_ID") && variable("SLURM_STEP_ID")) {
        local = variable("SLURM_STEP_NUM_NODES");
        wanted = 1;
        names = slurm;
        n = sizeof slurm / sizeof *slurm;
    }
    if (!local || !store_parse_int(local, 1, STORE_WORLD_MAX, &have) || have != wanted) return 0;
    uint64_t hash = mix(HASH_START, launcher == LAUNCHER_SLURM ? "slurm" : "openmpi");
    for (size_t i = 0; i < n; i++) hash = mix(hash, variable(names[i]));
    *identity = hash;
    return 1;
}

static const char *runtime_folder(void)
{
    const char *folder = variable("XDG_RUNTIME_DIR");
    struct stat st;
    if (folder && folder[0] == '/' && strlen(folder) < STORE_PATH_MAX - 128 && stat(folder, &st) == 0 &&
        S_ISDIR(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 022) == 0)
        return folder;
    return "/tmp";
}

static fsdp_status missing(enum store_launcher launcher, const char *name, int32_t world_size)
{
    const char *who = launcher == LAUNCHER_TORCHRUN ? "torchrun and `python -m libfsdp.run` set it"
                      : launcher == LAUNCHER_NONE   ? "the job's launcher or script must set it"
                                                    : "this launcher does not set it, the job's script must";
    return err(FSDP_ERR_RENDEZVOUS,
               "a job of %" PRId32
               " ranks has no address to meet at: the environment variable %s is not set (%s); set MASTER_ADDR and "
               "MASTER_PORT to rank 0's host and a free port there, or FSDP_STORE to a tcp:// or file:// URL",
               world_size, name, who);
}

int store_env_has_url(void)
{
    return variable("FSDP_STORE") != NULL;
}

fsdp_status store_env_address(enum store_launcher launcher, int32_t world_size, struct store_address *out)
{
    const char *url = variable("FSDP_STORE");
    if (url) {
        fsdp_status status = store_url_parse(url, out);
        if (status != FSDP_OK) return err_prefix(status, "the environment variable FSDP_STORE: ");
        if (out->scheme != STORE_ENV) return FSDP_OK;
        return err(FSDP_ERR_RENDEZVOUS, "the environment variable FSDP_STORE is '%s': expected a tcp:// or file:// URL",
                   url);
    }

    const char *host = variable("MASTER_ADDR");
    if (!host) {
        uint64_t identity;
        if (!job_on_this_host(launcher, world_size, &identity)) return missing(launcher, "MASTER_ADDR", world_size);
        memset(out, 0, sizeof *out);
        out->scheme = STORE_FILE;
        snprintf(out->path, sizeof out->path, "%s/libfsdp-%u-%016" PRIx64, runtime_folder(), (unsigned)geteuid(),
                 identity);
        return FSDP_OK;
    }

    const char *own = variable("FSDP_MASTER_PORT"), *shared = variable("MASTER_PORT");
    if (!own && !shared) return missing(launcher, "MASTER_PORT", world_size);
    int64_t port;
    TRY(number(own ? "FSDP_MASTER_PORT" : "MASTER_PORT", own ? own : shared, 1, 65535, &port));
    const char *agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    if (!own && agent && (strcmp(agent, "True") == 0 || strcmp(agent, "1") == 0)) port += port < 65535 ? 1 : -1;

    memset(out, 0, sizeof *out);
    out->scheme = STORE_TCP;
    size_t length = strlen(host);
    if (host[0] == '[' && host[length - 1] == ']') { /* brackets are a URL's need; torch takes both */
        host++;
        length -= 2;
    }
    if (length == 0 || length >= sizeof out->endpoint.host)
        return err(FSDP_ERR_RENDEZVOUS,
                   "the environment variable MASTER_ADDR is '%.300s': expected a host name or address",
                   variable("MASTER_ADDR"));
    memcpy(out->endpoint.host, host, length);
    out->endpoint.port = (uint16_t)port;
    return FSDP_OK;
}
