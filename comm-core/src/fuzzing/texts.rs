//! Texts: the environment, the command line, files.

use std::fmt::{Debug, Display};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::str::FromStr;

use super::target::{Target, Verdict};
use crate::addresses::PortRange;
use crate::interfaces::Bind;
use crate::job::{self, Address, HostList, Job, Secret};
use crate::table::Table;
use crate::{Algorithm, DType, OpKind, Waiting};

pub(super) fn targets() -> Vec<Target> {
    vec![
        Target::new("address", address, || {
            lines(&["[::1]:4000", "node-1.example:29500", "10.0.0.1:1", "file:/tmp/a b"])
        }),
        Target::new("job variables", job_variables, job_seeds).memory(8 << 10, 32),
        Target::new("host list", host_list, || {
            lines(&["node1", "n[08-11,3]x[1-2],login", "gpu-a[1-2]b[1-3]c[001-002]-ib"])
        })
        .memory(64 << 10, 64),
        Target::new("interfaces and ports", interfaces_and_ports, || {
            lines(&["^docker,lo\n20000-20100", "=eth0\n1-65535", "fe80::7\n7", "10.0.0.1\n5-6"])
        }),
        Target::new("ranks on a machine", ranks_on_a_machine, || lines(&["4", "2(x3),1", "16(x2)"])),
        Target::new("secret file", secret_file, || lines(&["0123456789abcdef", " 0123456789abcdef0123456789abcdef\n"]))
            .inputs_per_case(4),
        Target::new("names of settings", names, || {
            lines(&["bf16\nring", "adaptive\nhalving-doubling", "i8\npark\ntree"])
        }),
        Target::new("algorithm table", table, table_seeds).memory(8 << 10, 64),
    ]
}

fn lines(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// [`Address::parse`].
pub fn address(bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Rejected };
    let Ok(address) = Address::parse(text) else { return Verdict::Rejected };
    check_address(&address);
    Verdict::Accepted
}

fn check_address(address: &Address) {
    let written = address.to_string();
    assert_eq!(Address::parse(&written).ok().as_ref(), Some(address), "{written:?} is read as another address");
    if let Address::Tcp { host, port } = address {
        let ip = host.parse::<IpAddr>();
        assert!(*port != 0 && !host.is_empty() && !ip.is_ok_and(|ip| ip.is_unspecified()), "{address}");
    }
}

/// Variables that name files or their folders.
const FILES: [&str; 3] = [job::vars::SECRET_FILE, "XDG_CONFIG_HOME", "HOME"];

/// [`Job::from_vars`] on lines of `NAME=value`; files are not opened.
pub fn job_variables(bytes: &[u8]) -> Verdict {
    let text = String::from_utf8_lossy(bytes);
    let value = |name: &str| {
        let mut found = text.lines().filter_map(|line| line.split_once('=')).filter(|(key, _)| *key == name);
        found.next().map(|(_, value)| value.to_string()).filter(|_| !FILES.contains(&name))
    };
    let Ok(Some(job)) = Job::from_vars(&value) else { return Verdict::Rejected };
    assert!(job.rank < job.world_size && job.world_size <= job::MAX_WORLD_SIZE && job.id.len() <= job::MAX_JOB_ID);
    if job.world_size > 1 {
        check_address(&job.address);
    }
    // What a launcher would set for the same job.
    let again = |name: &str| match name {
        job::vars::RANK => Some(job.rank.to_string()),
        job::vars::WORLD_SIZE => Some(job.world_size.to_string()),
        job::vars::ADDR => (job.world_size > 1).then(|| job.address.to_string()),
        job::vars::SECRET => std::str::from_utf8(job.secret.bytes()).ok().map(str::to_string),
        job::vars::JOB_ID => Some(job.id.clone()),
        job::vars::EPOCH => Some(job.epoch.to_string()),
        _ => None,
    };
    let same = Job::from_vars(&again).expect("its own variables make sense").expect("a job");
    assert_eq!((same.rank, same.world_size, &same.id, same.epoch), (job.rank, job.world_size, &job.id, job.epoch));
    // The key of a job without a secret may end in a space.
    let secret = job.secret.bytes().trim_ascii();
    assert!(job.world_size == 1 || same.address == job.address && same.secret.bytes() == secret);
    assert!(
        !format!("{job:?}").contains(&String::from_utf8_lossy(job.secret.bytes()).into_owned()),
        "a secret is shown"
    );
    Verdict::Accepted
}

fn job_seeds() -> Vec<Vec<u8>> {
    const SECRET: &str = "COMM_SECRET=fedcba9876543210";
    lines(&[
        &format!("COMM_RANK=2\nCOMM_WORLD_SIZE=4\nCOMM_ADDR=[::1]:4000\nCOMM_JOB_ID=x\nCOMM_EPOCH=7\n{SECRET}\n"),
        &format!(
            "RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=29500\nTORCHELASTIC_USE_AGENT_STORE=True\n\
             TORCHELASTIC_RUN_ID=run\nTORCHELASTIC_RESTART_COUNT=3\n{SECRET}\n"
        ),
        "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=3\nCOMM_ADDR=file:/tmp/a\nCOMM_INSECURE=1\n",
        &format!("PMI_RANK=0\nPMI_SIZE=2\nMASTER_ADDR=10.0.0.1\nCOMM_PORT=5000\n{SECRET}\n"),
        &format!(
            "SLURM_PROCID=0\nSLURM_NTASKS=4\nSLURM_JOB_ID=12\nSLURM_STEP_ID=0\nSLURM_RESTART_COUNT=1\n\
             COMM_ADDR=127.0.0.1:4000\n{SECRET}\n"
        ),
        &format!(
            "SLURM_PROCID=1\nSLURM_NTASKS=4\nSLURM_JOB_ID=12\nSLURM_STEP_ID=3\nSLURM_STEP_TASKS_PER_NODE=2(x2)\n\
             SLURM_STEP_NODELIST=n[08-09]\nCOMM_PORT_RANGE=500-600\nCOMM_IFNAME=^docker\n{SECRET}\n"
        ),
        &format!("LWS_WORKER_INDEX=1\nLWS_GROUP_SIZE=3\nLWS_LEADER_ADDRESS=set-0.set.ns\n{SECRET}\n"),
        &format!(
            "PET_NODE_RANK=1\nPET_NNODES=3\nPET_NPROC_PER_NODE=1\nPET_MASTER_ADDR=h\nPET_MASTER_PORT=29500\n\
             JOBSET_RESTART_ATTEMPT=2\n{SECRET}\n"
        ),
        &format!(
            "JOB_COMPLETION_INDEX=1\nCOMM_WORLD_SIZE=3\nJOBSET_NAME=set\nREPLICATED_JOB_NAME=job\nJOB_INDEX=0\n{SECRET}\n"
        ),
        "COMM_RANK=0\nCOMM_WORLD_SIZE=1\n",
    ])
}

/// [`HostList`].
pub fn host_list(bytes: &[u8]) -> Verdict {
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Rejected };
    let Ok(list) = text.parse::<HostList>() else { return Verdict::Rejected };
    assert!((1..=job::MAX_WORLD_SIZE).contains(&list.count()));
    let is_name = |host: &String| !host.is_empty() && !host.contains([',', '[', ']', ' ']);
    assert!(list.hosts().take(1000).all(|host| is_name(&host)), "{text:?}");
    assert_eq!(list.hosts().take(1000).count(), list.count().min(1000));
    Verdict::Accepted
}

/// [`Bind`] and [`PortRange`], each on a line.
pub fn interfaces_and_ports(bytes: &[u8]) -> Verdict {
    fn read<T: FromStr + Display + PartialEq + Debug>(text: &str) -> bool {
        let Ok(value) = text.parse::<T>() else { return false };
        assert_eq!(value.to_string().parse::<T>().ok(), Some(value));
        true
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Rejected };
    let Some((bind, ports)) = text.split_once('\n') else { return Verdict::Rejected };
    (read::<Bind>(bind) | read::<PortRange>(ports)).into()
}

/// [`job::ranks_on_this_machine`], from one variable's value.
pub fn ranks_on_a_machine(bytes: &[u8]) -> Verdict {
    let text = String::from_utf8_lossy(bytes);
    let ranks = job::local_ranks(&|name| (name == "SLURM_STEP_TASKS_PER_NODE").then(|| text.clone().into_owned()));
    assert!(ranks != Some(0));
    ranks.is_some().into()
}

/// [`Secret::read`].
pub fn secret_file(bytes: &[u8]) -> Verdict {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("a short file");
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o600)).expect("a file of this process");
    let Ok(secret) = Secret::read(file.path()) else { return Verdict::Rejected };
    assert!(secret.bytes().len() >= Secret::MIN_LEN && secret.bytes() == secret.bytes().trim_ascii());
    assert!(bytes.windows(secret.bytes().len()).any(|part| part == secret.bytes()));
    Verdict::Accepted
}

/// The names of types, algorithms and ways to wait, one a line.
pub fn names(bytes: &[u8]) -> Verdict {
    fn read<T: FromStr + Display + PartialEq + Debug>(text: &str) -> bool {
        let Ok(value) = text.parse::<T>() else { return false };
        assert_eq!(value.to_string().parse::<T>().ok(), Some(value));
        true
    }
    let Ok(text) = std::str::from_utf8(bytes) else { return Verdict::Rejected };
    let known = text.lines().filter(|name| read::<DType>(name) | read::<Algorithm>(name) | read::<Waiting>(name));
    (known.count() > 0).into()
}

/// A [`Table`] from a file.
pub fn table(bytes: &[u8]) -> Verdict {
    let Ok(table) = serde_json::from_slice::<Table>(bytes) else { return Verdict::Rejected };
    let written = serde_json::to_vec(&table).expect("a table can be written");
    assert_eq!(serde_json::from_slice::<Table>(&written).ok().as_ref(), Some(&table));
    assert_eq!(table.fingerprint().len(), 16);
    for kind in OpKind::ALL {
        for (count, ranks) in [(0, 1), (1, 2), (1000, 3), (usize::MAX, 4), (1 << 20, 1 << 16)] {
            let algorithm = table.choose(kind, DType::F32, count, ranks);
            assert!(
                crate::table::supports(algorithm, kind, DType::F32, ranks),
                "{algorithm} for {kind} on {ranks} ranks"
            );
        }
    }
    Verdict::Accepted
}

fn table_seeds() -> Vec<Vec<u8>> {
    let short =
        br#"{"name":"mine","rules":[{"kind":"all-reduce","ranks":4,"bytes":65536,"algorithm":"ring"}],"piece":4096}"#;
    vec![short.to_vec(), serde_json::to_vec(&Table::fixed()).expect("a table can be written")]
}
