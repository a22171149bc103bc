//! What is read from variables.

use super::*;

#[test]
fn the_source_of_rank_and_world_size_is_known() {
    for (rank, size, more, source, said) in [
        ("COMM_RANK", "COMM_WORLD_SIZE", None, Source::Hand, "COMM_RANK and COMM_WORLD_SIZE"),
        (
            "COMM_RANK",
            "COMM_WORLD_SIZE",
            Some(("COMM_LAUNCHER_PID", "1")),
            Source::Launch,
            "COMM_RANK and COMM_WORLD_SIZE of this program's own launcher",
        ),
        ("RANK", "WORLD_SIZE", None, Source::Torchrun, "RANK and WORLD_SIZE (torchrun)"),
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            None,
            Source::OpenMpi,
            "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (Open MPI)",
        ),
        ("PMI_RANK", "PMI_SIZE", None, Source::Mpich, "PMI_RANK and PMI_SIZE (MPICH or Intel MPI)"),
        ("PMIX_RANK", "COMM_WORLD_SIZE", None, Source::Pmix, "PMIX_RANK and COMM_WORLD_SIZE (PMIx)"),
        (
            "LWS_WORKER_INDEX",
            "LWS_GROUP_SIZE",
            None,
            Source::LeaderWorkerSet,
            "LWS_WORKER_INDEX and LWS_GROUP_SIZE (LeaderWorkerSet)",
        ),
        ("PET_NODE_RANK", "PET_NNODES", None, Source::Kubeflow, "PET_NODE_RANK and PET_NNODES (Kubeflow)"),
        (
            "JOB_COMPLETION_INDEX",
            "COMM_WORLD_SIZE",
            None,
            Source::Kubernetes,
            "JOB_COMPLETION_INDEX and COMM_WORLD_SIZE (Kubernetes)",
        ),
        (
            "SLURM_PROCID",
            "SLURM_NTASKS",
            Some(("SLURM_STEP_ID", "0")),
            Source::Slurm,
            "SLURM_PROCID and SLURM_NTASKS (Slurm)",
        ),
    ] {
        let base = [(rank, "0"), (size, "2"), ("COMM_ADDR", "h:9"), SECRET];
        let vars: Vec<(&str, &str)> = base.into_iter().chain(more).collect();
        let job = found(&vars);
        assert_eq!((job.source, job.source.to_string().as_str()), (source, said));
        assert_eq!(source.variables(), Some((rank, size)));
    }
    let secret = Secret::new("0123456789abcdef").unwrap();
    assert_eq!(Job::new(0, 1, tcp("h", 1), secret).unwrap().source, Source::Program);
}

const SECRET: (&str, &str) = ("COMM_SECRET", "0123456789abcdef");

fn job(vars: &[(&str, &str)]) -> Result<Option<Job>> {
    Job::from_vars(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string()))
}

fn found(vars: &[(&str, &str)]) -> Job {
    job(vars).unwrap().unwrap()
}

fn error(vars: &[(&str, &str)]) -> String {
    job(vars).unwrap_err().to_string()
}

fn tcp(host: &str, port: u16) -> Address {
    Address::Tcp { host: host.into(), port }
}

#[test]
fn no_launcher_is_no_job() {
    assert!(job(&[]).unwrap().is_none());
    assert!(job(&[("MASTER_ADDR", "host"), SECRET]).unwrap().is_none());
}

#[test]
fn own_variables_win() {
    let vars = [
        ("RANK", "0"),
        ("WORLD_SIZE", "9"),
        ("COMM_RANK", "2"),
        ("COMM_WORLD_SIZE", "4"),
        ("COMM_ADDR", "[::1]:4000"),
        ("COMM_JOB_ID", "x"),
        ("COMM_EPOCH", "7"),
        SECRET,
    ];
    let job = found(&vars);
    assert_eq!((job.rank, job.world_size, job.id.as_str(), job.epoch), (2, 4, "x", 7));
    assert_eq!(job.address, tcp("::1", 4000));
    assert_eq!(job.address.to_string(), "[::1]:4000");
}

#[test]
fn torchrun_keeps_its_store_on_the_master_port() {
    let base = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500"), SECRET];
    assert_eq!(found(&base).address, tcp("h", 29500));
    let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
    assert_eq!(found(&[&base[..], &[agent]].concat()).address, tcp("h", 29501));
    let port = ("COMM_PORT", "5000");
    assert_eq!(found(&[&base[..], &[agent, port]].concat()).address, tcp("h", 5000));
    let restart = [("TORCHELASTIC_RUN_ID", "run"), ("TORCHELASTIC_RESTART_COUNT", "3")];
    let job = found(&[&base[..], &restart].concat());
    assert_eq!((job.id.as_str(), job.epoch), ("run", 3));
}

#[test]
fn mpi_and_slurm() {
    let address = ("COMM_ADDR", "file:/tmp/a");
    let job1 = found(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "3"), address, SECRET]);
    assert_eq!((job1.rank, job1.world_size), (1, 3));
    assert_eq!(job1.address, Address::File("/tmp/a".into()));
    assert_eq!(found(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), address, SECRET]).rank, 1);
    let address = ("COMM_ADDR", "n1:4000");
    let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "12"), address, SECRET];
    assert!(job(&batch).unwrap().is_none(), "a batch script is not a rank");
    let step = found(&[&batch[..], &[("SLURM_STEP_ID", "0")]].concat());
    assert_eq!((step.world_size, step.id.as_str()), (4, "12.0"));
    // The batch script, the shell of salloc, and what no number is.
    for step in ["4294967291", "4294967290", "4294967294", "batch", "interactive"] {
        assert!(job(&[&batch[..], &[("SLURM_STEP_ID", step)]].concat()).unwrap().is_none(), "{step}");
    }
}

#[test]
fn nonsense_is_named() {
    let address = ("COMM_ADDR", "127.0.0.1:4000");
    let at = |rank, world| error(&[("COMM_RANK", rank), ("COMM_WORLD_SIZE", world), address, SECRET]);
    assert!(at("4", "4").contains("COMM_RANK is 4 and COMM_WORLD_SIZE is 4"));
    assert!(at("0", "0").contains("COMM_WORLD_SIZE is 0"));
    assert!(at("-1", "2").contains("COMM_RANK=-1"));
    assert!(at("0", "many").contains("COMM_WORLD_SIZE=many"));
    assert!(error(&[("COMM_RANK", "0")]).contains("COMM_WORLD_SIZE is not"));
    let two = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2")];
    assert!(error(&[&two[..], &[SECRET]].concat()).contains("COMM_ADDR"));
    assert!(error(&[&two[..], &[address]].concat()).contains("COMM_SECRET_FILE"));
    assert!(error(&[&two[..], &[address, ("COMM_SECRET", "short")]].concat()).contains("16"));
    for text in ["host", "host:", ":80", "host:0", "host:99999", "file:"] {
        assert!(error(&[&two[..], &[("COMM_ADDR", text), SECRET]].concat()).contains("address"), "{text}");
    }
}

#[test]
fn an_address_is_written_as_it_is_read() {
    for text in ["[[::1]]:80", "[[x]]:80", "x]:80", "[:80"] {
        assert!(Address::parse(text).is_err(), "{text}");
    }
    let vars = |host| [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MASTER_ADDR", host), ("COMM_PORT", "80"), SECRET];
    assert_eq!(found(&vars("[::1]")).address, tcp("::1", 80));
    for host in ["0.0.0.0", "[::]", "::", "[]", "]"] {
        assert!(error(&vars(host)).contains("address"), "{host}");
    }
}

#[test]
fn insecure_has_to_be_asked_for() {
    let vars = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2"), ("COMM_ADDR", "127.0.0.1:4000")];
    assert!(job(&vars).is_err());
    assert!(job(&[&vars[..], &[("COMM_INSECURE", "1")]].concat()).unwrap().is_some());
}

#[test]
fn a_program_can_ask_for_insecure_too_and_a_secret_still_wins() {
    let vars = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2"), ("COMM_ADDR", "10.0.0.1:4000")];
    let with = |vars: &[(&str, &str)], insecure| {
        Job::from_vars_with(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string()), insecure)
    };
    let error = with(&vars, false).unwrap_err().to_string();
    assert!(error.contains("--insecure") && error.contains("COMM_INSECURE=1"), "{error}");
    let open = with(&vars, true).unwrap().unwrap().secret;
    let by_variable = with(&[&vars[..], &[("COMM_INSECURE", "1")]].concat(), false).unwrap().unwrap().secret;
    assert_eq!(open.bytes(), by_variable.bytes());
    let secret = with(&[&vars[..], &[SECRET]].concat(), true).unwrap().unwrap().secret;
    assert_eq!(secret.bytes(), SECRET.1.as_bytes());
    assert!(with(&[&vars[..], &[("COMM_INSECURE", "yes")]].concat(), false).is_err(), "only 1 means it");
}

#[test]
fn addresses_of_everybody_are_no_place_to_meet() {
    for host in ["0.0.0.0", "[::]", "255.255.255.255", "[ff02::1]"] {
        let vars = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2"), SECRET];
        let error = error(&[&vars[..], &[("COMM_ADDR", &format!("{host}:4000"))]].concat());
        assert!(error.contains("name the one address of this machine"), "{error}");
    }
}

#[test]
fn exit_codes_tell_an_echo_from_a_cause() {
    let lost = |rank| Error::PeerLost { rank, operation: String::new(), detail: "gone".into() };
    let timeout = |rank, waiting_for: &[usize]| {
        let waited = std::time::Duration::from_secs(1);
        Error::Timeout { rank, operation: "x".into(), waited, waiting_for: waiting_for.to_vec() }
    };
    let mismatch = |rank, peer| Error::Mismatch { rank, ours: "a".into(), peer, theirs: "b".into() };
    for (error, code) in [
        (lost(2), EXIT_ECHO),
        (lost(1), 1),
        (Error::Aborted { by: 0, reason: "enough".into() }, EXIT_ECHO),
        (Error::Aborted { by: 1, reason: "enough".into() }, 1),
        (timeout(0, &[2]), EXIT_ECHO),
        (timeout(0, &[1]), 1),
        (timeout(1, &[2]), EXIT_ECHO),
        (timeout(1, &[]), 1),
        (mismatch(0, 2), EXIT_ECHO),
        (mismatch(0, 1), 1),
        (Error::Rendezvous("x".into()), 1),
        (Error::invalid("x"), EXIT_CONFIGURATION),
        (Error::Unsupported { what: "x".into(), why: "y".into() }, EXIT_CONFIGURATION),
    ] {
        assert_eq!(exit_code(&error, 1), code, "{error}");
    }
}

#[test]
fn one_rank_needs_neither_address_nor_secret() {
    assert_eq!(found(&[("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "1")]).world_size, 1);
}

/// Variables of a line such as `RANK=1 WORLD_SIZE=2`.
fn of(line: &str) -> Vec<(&str, &str)> {
    line.split_whitespace().map(|variable| variable.split_once('=').unwrap()).collect()
}

const STEP: &str =
    "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=12 SLURM_STEP_ID=3 SLURM_NODEID=0 COMM_SECRET=0123456789abcdef";

#[test]
fn launchers_say_where_to_meet() {
    // 31 · 12 + 3 ports after the first.
    let cases = [
        ("SLURM_STEP_NODELIST=n[08-11] SLURM_JOB_NODELIST=n[01-11] SLURM_STEP_TASKS_PER_NODE=1(x4)", "n08:20375"),
        ("SLURM_JOB_NODELIST=rack[2-3]n[1,5],x SLURM_STEP_TASKS_PER_NODE=2(x2)", "rack2n1:20375"),
        ("SLURM_STEP_NODELIST=n1 SLURM_STEP_TASKS_PER_NODE=4", "LOOPBACK:20375"),
        ("SLURM_STEP_NODELIST=n[1-2] COMM_PORT=4000", "n1:4000"),
        ("SLURM_STEP_NODELIST=n[1-2] SLURM_NODE_ALIASES=n10:10.0.0.9:x,n1:10.0.0.7:y COMM_PORT=4", "10.0.0.7:4"),
        ("SLURM_STEP_NODELIST=n[1-2] SLURM_NODE_ALIASES=n1:[fd00::7]:y COMM_PORT=4", "[fd00::7]:4"),
        ("SLURM_STEP_NODELIST=n[1-2] SLURM_NODE_ALIASES=(null) COMM_PORT=4", "n1:4"),
        ("SLURM_STEP_NODELIST=n[1-2] COMM_PORT_RANGE=500-599", "n1:575"),
        ("SLURM_STEP_NODELIST=n[1-2] MASTER_ADDR=h MASTER_PORT=4000", "h:4000"),
        ("SLURM_STEP_NODELIST=n[1-2] MASTER_ADDR=h", "h:20375"),
        ("SLURM_STEP_NODELIST=n[1-2] COMM_ADDR=[fd00::1]:5 MASTER_ADDR=h MASTER_PORT=4000", "[fd00::1]:5"),
        ("SLURM_STEP_NODELIST=n[1-2] SLURM_HET_SIZE=1", "n1:20375"),
        ("SLURM_STEP_NODELIST=n[1-2] SLURM_HET_SIZE=2 COMM_ADDR=h:5", "h:5"),
        // srun that speaks PMI, too, and PMIx.
        ("SLURM_STEP_NODELIST=n[1-2] PMI_RANK=1 PMI_SIZE=4", "n1:20375"),
        ("SLURM_STEP_NODELIST=n[1-2] PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.12.3", "n1:20375"),
    ];
    let loopback = crate::addresses::loopback().to_string();
    for (more, address) in cases {
        let job = found(&[of(STEP), of(more)].concat());
        let address = address.replace("LOOPBACK", &loopback);
        assert_eq!((job.rank, job.world_size, job.address.to_string()), (1, 4, address), "{more}");
        assert_eq!((job.source, job.id.as_str()), (Source::Slurm, "12.3"), "{more}");
    }
    let at = |line: &str| found(&[of(line), vec![SECRET]].concat());
    // Started by mpirun in an allocation of Slurm, by daemons that srun has started.
    let mpi =
        "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=5 PMIX_NAMESPACE=77";
    let job = at(&format!(
        "{mpi} SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0 SLURM_JOB_NODELIST=n[1-2] SLURM_STEP_NODELIST=n2 COMM_PORT=9"
    ));
    assert_eq!((job.rank, job.address.to_string(), job.source), (5, "n1:9".into(), Source::OpenMpi));
    assert!(job.network.across_hosts);
    let job = at(&mpi.replace("LOCAL_SIZE=4", "LOCAL_SIZE=8"));
    assert!(!job.network.across_hosts && job.address.to_string().starts_with(&loopback), "{}", job.address);
    assert_eq!(job.id, "77");
    // Kubernetes.
    let lws = at("LWS_WORKER_INDEX=2 LWS_GROUP_SIZE=3 LWS_LEADER_ADDRESS=set-0.set.ns COMM_PORT=9");
    assert_eq!((lws.rank, lws.world_size, lws.address), (2, 3, tcp("set-0.set.ns", 9)));
    let pet = "PET_NODE_RANK=1 PET_NNODES=3 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=h PET_MASTER_PORT=29500 JOB_COMPLETION_INDEX=1";
    let pet = at(pet);
    assert_eq!((pet.rank, pet.world_size, pet.address, pet.source), (1, 3, tcp("h", 29500), Source::Kubeflow));
    let set =
        "JOB_COMPLETION_INDEX=2 COMM_WORLD_SIZE=3 JOBSET_NAME=set REPLICATED_JOB_NAME=ranks COMM_PORT=9 JOB_INDEX=0";
    assert_eq!(at(set).address, tcp("set-ranks-0-0.set", 9));
    assert_eq!(at(&format!("{set} JOBSET_COORDINATOR=first.set")).address, tcp("first.set", 9));
    // PyTorchJob, whose pods have both.
    let both = at("RANK=2 WORLD_SIZE=3 MASTER_ADDR=h MASTER_PORT=23456 PET_NODE_RANK=2 PET_NNODES=3");
    assert_eq!((both.rank, both.address, both.source), (2, tcp("h", 23456), Source::Torchrun));
    // An array of jobs that have nothing to do with each other.
    assert!(job_of("JOB_COMPLETION_INDEX=2").unwrap().is_none());
    // A single pod is a machine without a launcher, and so is the shell of salloc, which may have a rank of Slurm's PMIx.
    assert!(job_of("LWS_WORKER_INDEX=0 LWS_GROUP_SIZE=1 LWS_LEADER_ADDRESS=h").unwrap().is_none());
    assert!(job_of("PET_NODE_RANK=0 PET_NNODES=1 PET_NPROC_PER_NODE=auto PET_MASTER_ADDR=h").unwrap().is_none());
    let shell = "SLURM_JOB_ID=12 SLURM_STEP_ID=4294967290 PMIX_RANK=0";
    assert!(job_of(&format!("{shell} PMIX_NAMESPACE=slurm.pmix.12.4294967290")).unwrap().is_none());
    let by_another = format!("{shell} PMIX_NAMESPACE=prterun-host-77@1");
    assert!(job_of(&by_another).unwrap_err().to_string().contains("PMIX_RANK is 0"));
}

#[test]
fn two_agents_of_torchrun_may_be_on_one_machine() {
    let line = "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=r MASTER_ADDR=127.0.0.1 MASTER_PORT=9";
    let job = found(&[of(line), vec![SECRET]].concat());
    assert!(!job.network.across_hosts);
    assert_eq!(job.address, tcp("127.0.0.1", 9));
}

fn job_of(line: &str) -> Result<Option<Job>> {
    job(&of(line))
}

#[test]
fn what_was_found_is_said() {
    let job = found(
        &[of(STEP), of("SLURM_STEP_NODELIST=n[1-2] SLURM_RESTART_COUNT=2 COMM_IFNAME=^docker COMM_PORT_RANGE=7-9")]
            .concat(),
    );
    assert_eq!(
        job.describe(),
        "rank 1 of 4 by SLURM_PROCID and SLURM_NTASKS (Slurm); rank 0 at n1:7 by SLURM_STEP_NODELIST and the job id 12.3 (one of the ports \
         7-9); secret by COMM_SECRET; epoch 2; listening at ^docker by COMM_IFNAME; ports 7-9 by COMM_PORT_RANGE"
    );
    assert_eq!(found(&of("RANK=0 WORLD_SIZE=1")).describe(), "rank 0 of 1 by RANK and WORLD_SIZE (torchrun)");
}

#[test]
fn every_restart_is_another_epoch() {
    let epoch = |line: &str| found(&[of(line), of("COMM_ADDR=h:9"), vec![SECRET]].concat()).epoch;
    let torchrun = "RANK=1 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=r TORCHELASTIC_RESTART_COUNT=3";
    let set = "JOB_COMPLETION_INDEX=1 COMM_WORLD_SIZE=4 JOBSET_RESTART_ATTEMPT=5";
    for (line, expected) in [
        (torchrun.to_string(), 3),
        (format!("{torchrun} GROUP_WORLD_SIZE=1"), 3),
        // Agents count each for itself.
        (format!("{torchrun} GROUP_WORLD_SIZE=2"), 0),
        (format!("{torchrun} SLURM_RESTART_COUNT=2"), (2 << 32) + 3),
        (format!("{torchrun} GROUP_WORLD_SIZE=2 JOBSET_RESTART_ATTEMPT=2"), 2 << 32),
        (format!("{torchrun} COMM_EPOCH=9"), 9),
        (set.to_string(), 5),
        ("SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_RESTART_COUNT=4".into(), 4),
        ("COMM_RANK=1 COMM_WORLD_SIZE=4 SLURM_RESTART_COUNT=4".into(), 0),
    ] {
        assert_eq!(epoch(&line), expected, "{line}");
    }
    assert!(error(&[of(STEP), of("SLURM_RESTART_COUNT=many")].concat()).contains("SLURM_RESTART_COUNT=many"));
}

#[test]
fn every_misconfiguration_has_its_message() {
    let no_secret = STEP.replace(" COMM_SECRET=0123456789abcdef", "");
    let several = "SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=2(x2)";
    let secret = "COMM_SECRET=0123456789abcdef COMM_ADDR=h:9";
    let cases: &[(String, &[&str])] = &[
        (format!("{STEP} SLURM_STEP_NODELIST=n[1-"), &["SLURM_STEP_NODELIST", "'n[1-'", "not closed", "COMM_ADDR"]),
        (STEP.into(), &["does not know where to meet", "SLURM_PROCID", "COMM_ADDR=host:port"]),
        (format!("{no_secret} {several}"), &["no secret", "n1:20375", "COMM_SECRET_FILE", ".config/isocomm/secret"]),
        (
            format!("{STEP} {several} COMM_ADDR=127.0.0.1:9"),
            &["127.0.0.1:9 (by COMM_ADDR)", "SLURM_STEP_TASKS_PER_NODE", "several"],
        ),
        (
            format!("{STEP} {several} MASTER_ADDR=localhost MASTER_PORT=9"),
            &["localhost:9 (by MASTER_ADDR and MASTER_PORT)"],
        ),
        (format!("{STEP} {several} COMM_PORT=0"), &["port 0", "COMM_PORT"]),
        (format!("{STEP} {several} SLURM_HET_SIZE=2"), &["SLURM_HET_SIZE is 2", "COMM_ADDR=host:port"]),
        (format!("{STEP} RANK=0 WORLD_SIZE=4"), &["RANK is 0 and WORLD_SIZE is 4", "SLURM_PROCID is 1"]),
        (format!("{STEP} {several} COMM_PORT_RANGE=9-5"), &["COMM_PORT_RANGE: 9-5", "20000-20100"]),
        (format!("{STEP} {several} COMM_IFNAME=eth0:1"), &["COMM_IFNAME: 'eth0:1'"]),
        (format!("{STEP} {several} COMM_IFNAME=^"), &["COMM_IFNAME: '^'", "^docker"]),
        // Exported for all processes that srun starts.
        (
            format!("{STEP} RANK=0 WORLD_SIZE=1"),
            &["RANK is 0 and WORLD_SIZE is 1", "SLURM_PROCID is 1 and SLURM_NTASKS is 4", "env -u RANK"],
        ),
        (format!("{STEP} COMM_RANK=2 COMM_WORLD_SIZE=4"), &["COMM_RANK is 2", "SLURM_PROCID is 1"]),
        (
            format!(
                "{STEP} LWS_WORKER_INDEX=1 LWS_GROUP_SIZE=4 PMI_RANK=3 PMI_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4"
            ),
            &["OMPI_COMM_WORLD_RANK is 2", "PMI_RANK is 3"],
        ),
        (format!("PMIX_RANK=1 {secret}"), &["PMIX_RANK is 1", "COMM_WORLD_SIZE"]),
        (format!("LWS_WORKER_INDEX=1 {secret}"), &["LWS_WORKER_INDEX is set but LWS_GROUP_SIZE is not"]),
        (format!("LWS_WORKER_INDEX=3 LWS_GROUP_SIZE=3 {secret}"), &["LWS_WORKER_INDEX is 3 and LWS_GROUP_SIZE is 3"]),
        (format!("PET_NODE_RANK=0 PET_NNODES=2:4 {secret}"), &["PET_NNODES=2:4 is not a number"]),
        (
            format!("PET_NODE_RANK=0 PET_NNODES=2 PET_NPROC_PER_NODE=4 {secret}"),
            &["PET_NPROC_PER_NODE is 4", "torchrun --no-python"],
        ),
        (format!("PET_NODE_RANK=0 PET_NNODES=2 PET_NPROC_PER_NODE=auto {secret}"), &["PET_NPROC_PER_NODE is auto"]),
        (format!("JOB_COMPLETION_INDEX=0 COMM_WORLD_SIZE=4 JOB_INDEX=1 {secret}"), &["JOB_INDEX is 1", "1 replica"]),
        ("JOB_COMPLETION_INDEX=0 COMM_WORLD_SIZE=4 JOBSET_NAME=set".into(), &["but REPLICATED_JOB_NAME, which"]),
        ("JOB_COMPLETION_INDEX=0 COMM_WORLD_SIZE=4".into(), &["does not know where to meet"]),
        ("COMM_WORLD_SIZE=4".into(), &["COMM_WORLD_SIZE is 4, but COMM_RANK is not set"]),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h COMM_SECRET=0123456789abcdef".into(),
            &["neither COMM_PORT nor MASTER_PORT"],
        ),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=65535 TORCHELASTIC_USE_AGENT_STORE=True".into(),
            &["65535", "COMM_PORT"],
        ),
    ];
    for (line, parts) in cases {
        let said = error(&of(line));
        for part in *parts {
            assert!(said.contains(part), "{line}: {part:?} in {said:?}");
        }
        assert!(!said.contains('\n'), "{said}");
    }
}

#[test]
fn launchers_that_start_one_another_do_not_contradict() {
    let secret = "COMM_SECRET=0123456789abcdef COMM_ADDR=h:9";
    for (line, rank, size) in [
        // One agent of torchrun a node, or one by srun --pty.
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 RANK=5 WORLD_SIZE=8 TORCHELASTIC_RUN_ID=r", 5, 8),
        ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0 RANK=1 WORLD_SIZE=2", 1, 2),
        // Other launchers than torchrun, one a node.
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 RANK=5 WORLD_SIZE=8 LOCAL_RANK=1", 5, 8),
        ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0 COMM_RANK=1 COMM_WORLD_SIZE=2", 1, 2),
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 PMI_RANK=5 PMI_SIZE=8", 5, 8),
        ("SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_STEP_ID=0 RANK=3 WORLD_SIZE=4", 3, 4),
        ("JOB_COMPLETION_INDEX=1 PET_NODE_RANK=1 PET_NNODES=2 RANK=3 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=r", 3, 4),
        ("LWS_WORKER_INDEX=1 LWS_GROUP_SIZE=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", 3, 4),
        ("JOB_COMPLETION_INDEX=1 COMM_RANK=3 COMM_WORLD_SIZE=4", 3, 4),
        // This program's own launcher takes away what others have said, but not everything that looks like it.
        ("SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0 COMM_RANK=3 COMM_WORLD_SIZE=4 COMM_LAUNCHER_PID=7", 3, 4),
    ] {
        let job = found(&[of(line), of(secret)].concat());
        assert_eq!((job.rank, job.world_size), (rank, size), "{line}");
    }
}

#[test]
fn the_users_own_secret_is_made_where_all_ranks_find_the_same() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join(".config/isocomm/secret");
    let home = home.path().display().to_string();
    let with_home = |line: &str| job(&[of(line), vec![("HOME", home.as_str())]].concat());
    let ranks = "COMM_RANK=0 COMM_WORLD_SIZE=2 COMM_ADDR=h:9";
    let pods = "LWS_WORKER_INDEX=0 LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=h";
    for line in [ranks, pods, "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=9"] {
        assert!(with_home(line).unwrap_err().to_string().contains("no secret"), "{line}");
    }
    assert!(!path.exists());
    let slurm = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=12 SLURM_STEP_ID=3 SLURM_STEP_NODELIST=n[1-2]";
    let job = with_home(slurm).unwrap().unwrap();
    assert_eq!((job.secret.bytes().len(), job.found.secret), (64, path.display().to_string()));
    for line in [
        ranks,
        pods,
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 COMM_ADDR=h:9",
        "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=9",
    ] {
        assert_eq!(with_home(line).unwrap().unwrap().secret.bytes(), job.secret.bytes(), "{line}");
    }
    // What a user says comes first, and one that others can read is none.
    let open = with_home(&format!("{ranks} COMM_INSECURE=1")).unwrap().unwrap();
    assert!(open.secret.bytes() != job.secret.bytes() && open.found.secret.contains("open to anyone"));
    let other = with_home(&format!("{ranks} COMM_SECRET=0123456789abcdef")).unwrap().unwrap();
    assert_eq!(other.secret.bytes(), b"0123456789abcdef");
    std::process::Command::new("chmod").arg("644").arg(&path).status().unwrap();
    assert!(with_home(slurm).unwrap_err().to_string().contains("chmod 600"));
}
