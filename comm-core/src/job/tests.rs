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
        ("PMI_RANK", "PMI_SIZE", None, Source::Mpich, "PMI_RANK and PMI_SIZE (MPICH)"),
        (
            "SLURM_PROCID",
            "SLURM_NTASKS",
            Some(("SLURM_STEP_ID", "0")),
            Source::Slurm,
            "SLURM_PROCID and SLURM_NTASKS (Slurm)",
        ),
    ] {
        let vars: Vec<(&str, &str)> = [(rank, "0"), (size, "1")].into_iter().chain(more).collect();
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
        (Error::invalid("x"), 1),
    ] {
        assert_eq!(exit_code(&error, 1), code, "{error}");
    }
}

#[test]
fn one_rank_needs_neither_address_nor_secret() {
    assert_eq!(found(&[("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "1")]).world_size, 1);
}
