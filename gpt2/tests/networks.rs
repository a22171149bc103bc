//! Training between machines, and on those that lack something: network namespaces stand for machines. Where the system does not allow
//! these, the tests say that they were skipped.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// The arguments of a short training, in the folder of [`data`].
const TRAIN: &str =
    "train --strategy ddp --preset micro --tokenizer bytes --data t.txt --steps 2 --batch 6 --eval-every 0 --threads 1";

/// Two machines, 10.9.0.1 and 10.9.0.2: this one, and the one that `$OTHER` runs in.
const TWO_MACHINES: &str = r#"
unshare --net sleep 600 &
HOLDER=$!
trap 'kill $HOLDER' EXIT
until [ "$(readlink /proc/$HOLDER/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
OTHER="nsenter --net --target $HOLDER"
ip link add near type veth peer name far netns $HOLDER
ip address add 10.9.0.1/24 dev near
ip link set near up
$OTHER ip link set lo up
$OTHER ip address add 10.9.0.2/24 dev far
$OTHER ip link set far up
"#;

/// Three machines, which `$HOST0` to `$HOST2` run in, with addresses of IP version `$VERSION` alone. Each has two interfaces that lead nowhere before
/// the one that leads to the others, `net0`: one with the same address on all machines and the default route, as of containers' networks, and one
/// with an address of its own.
const THREE_MACHINES: &str = r#"
ip link add switch type bridge stp_state 0
ip link set switch up
HOLDERS=
trap 'kill $HOLDERS' EXIT
for N in 0 1 2; do
    unshare --net sleep 600 &
    HOLDERS="$HOLDERS $!"
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    HOST="nsenter --net --target $!"
    eval "HOST$N='$HOST'"
    for DECOY in docker0 ib0; do
        $HOST ip link add $DECOY type veth peer name end-$DECOY
        $HOST ip link set end-$DECOY up
        $HOST ip link set $DECOY up
    done
    ip link add port$N type veth peer name net0 netns $!
    ip link set port$N master switch up
    $HOST ip link set lo up
    $HOST ip link set net0 up
    if [ $VERSION = 4 ]; then
        $HOST ip address add 172.17.0.1/16 dev docker0
        $HOST ip address add 10.55.0.1$N/24 dev ib0
        $HOST ip address add 10.9.0.1$N/24 dev net0
        $HOST ip route add default via 172.17.0.2
    else
        $HOST ip address del 127.0.0.1/8 dev lo
        $HOST ip address add fd00:17::1/64 dev docker0 nodad
        $HOST ip address add fd00:55::1$N/64 dev ib0 nodad
        $HOST ip address add fd00:9::1$N/64 dev net0 nodad
        $HOST ip route add default via fd00:17::2
    fi
done
"#;

fn gpt2() -> &'static str {
    env!("CARGO_BIN_EXE_gpt2")
}

/// A folder with a text.
fn data() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..4000).map(|line| format!("line {line} of a text to train on\n")).collect();
    fs::write(folder.path().join("t.txt"), text).unwrap();
    folder
}

/// Runs a script in a network namespace with loopback alone, after `setup`; `None` where that is not possible, which is said. It ends
/// within a minute, or has failed.
fn in_namespace(folder: &Path, setup: &str, script: &str) -> Option<Output> {
    let run = |script: &str| {
        let is_root =
            fs::read_to_string("/proc/self/status").unwrap().lines().any(|line| line.starts_with("Uid:\t0\t"));
        let user: &[&str] = if is_root { &[] } else { &["--user", "--map-root-user"] };
        Command::new("timeout")
            .args(["60", "unshare", "--net"])
            .args(user)
            .args(["--", "sh", "-c", &format!("set -e\nip link set lo up\n{setup}\n{script}")])
            .current_dir(folder)
            .env("COMM_SECRET", "a secret for tests only")
            .env("COMM_WORLD_SIZE", "2")
            .env_remove("COMM_RANK")
            .output()
    };
    match run("") {
        Ok(output) if output.status.success() => Some(run(script).unwrap()),
        Ok(output) => {
            println!("skipped: no network namespace: {}", String::from_utf8_lossy(&output.stderr));
            None
        }
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said).into_owned()).concat()
}

/// Starts a rank on each machine; afterwards `0.txt` and `1.txt` hold what they said, and the last two lines their exit codes.
fn ranks(transport: &str, more: [&str; 2]) -> String {
    let (gpt2, [first, second]) = (gpt2(), more);
    format!(
        "export COMM_ADDR=10.9.0.1:4000
         COMM_RANK=1 $OTHER {gpt2} {TRAIN} --transport {transport} --out one {second} >1.txt 2>&1 &
         RANK=$!
         set +e
         COMM_RANK=0 {gpt2} {TRAIN} --transport {transport} --out zero {first} >0.txt 2>&1
         echo $?
         wait $RANK
         echo $?"
    )
}

#[test]
fn two_machines_train_without_bind() {
    for transport in ["tcp", "tcp-raw", "quic"] {
        let folder = data();
        let Some(output) = in_namespace(folder.path(), TWO_MACHINES, &ranks(transport, [""; 2])) else { return };
        let text = ["0.txt", "1.txt"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap());
        assert_eq!(said(&output), "0\n0\n", "{transport}: {text:?}");
    }
}

/// A rank on each of three machines; afterwards their exit codes, and of each machine's interfaces what they have received and sent.
const ON_THREE_MACHINES: &str = r#"
export COMM_WORLD_SIZE=3
PIDS=
for N in 0 1 2; do
    eval "COMM_RANK=$N \$HOST$N $PROGRAM --out $N >$N.txt 2>&1 &"
    PIDS="$PIDS $!"
done
set +e
for PID in $PIDS; do wait $PID; echo code $?; done
for N in 0 1 2; do eval "\$HOST$N cat /proc/net/dev"; done
"#;

#[test]
fn of_several_interfaces_the_one_that_leads_to_the_others_is_used() {
    let alone = data();
    let ranks = ["--nproc", "3", "--transport", "tcp-raw", "--out", "out"];
    let arguments: Vec<&str> = TRAIN.split(' ').chain(ranks).collect();
    let output = crate::cli::gpt2(&arguments, alone.path());
    let weights = |text: &str| text.lines().find_map(|line| Some(line.split_once("weights: sha256 ")?.1.to_owned()));
    let expected = weights(&said(&output)).unwrap_or_else(|| panic!("{}", said(&output)));
    let (v4, v6) = (("4", "10.9.0.10:4000"), ("6", "[fd00:9::10]:4000"));
    for ((version, address), transport) in [(v4, "quic"), (v6, "tcp"), (v6, "quic")] {
        let what = format!("{transport} over IPv{version}");
        let folder = data();
        let setup = format!("VERSION={version}\n{THREE_MACHINES}");
        let program = format!("{} {TRAIN} --transport {transport} --timeout 30", gpt2());
        let script = format!("export COMM_ADDR={address}\nPROGRAM=\"{program}\"\n{ON_THREE_MACHINES}");
        let Some(output) = in_namespace(folder.path(), &setup, &script) else { return };
        let output = said(&output);
        let text = ["0.txt", "1.txt", "2.txt"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap());
        assert_eq!(output.matches("code 0\n").count(), 3, "{what}: {output} {text:?}");
        assert_eq!(weights(&text[0]).as_ref(), Some(&expected), "{what}: {text:?}");
        for (interface, bytes) in traffic(&output) {
            // A step sends each rank's share of the gradients both ways; what the kernel says by itself is a few hundred bytes.
            let fits = if interface == "net0" { bytes > 100_000 } else { bytes < 5_000 };
            assert!(fits, "{what}: {bytes} bytes over {interface}: {output}");
        }
    }
}

/// Interfaces and the bytes that they have received and sent, of the kernel's tables of three machines.
fn traffic(output: &str) -> Vec<(String, u64)> {
    let line = |line: &str| {
        let (name, counts) = line.split_once(':')?;
        let counts: Vec<u64> = counts.split_whitespace().map_while(|count| count.parse().ok()).collect();
        Some((name.trim().to_owned(), counts.first()? + counts.get(8)?))
    };
    let found: Vec<(String, u64)> = output.lines().filter_map(line).collect();
    assert_eq!(found.iter().filter(|(name, _)| name == "net0").count(), 3, "{output}");
    found
}

#[test]
fn data_travels_over_the_interface_that_is_named() {
    // A second link between the machines, beside the one over which they meet, and on each a decoy that leads nowhere.
    let setup = format!(
        "{TWO_MACHINES}
         ip link add fast0 type veth peer name fast1 netns $HOLDER
         ip address add 10.7.0.1/24 dev fast0; ip link set fast0 up
         $OTHER ip address add 10.7.0.2/24 dev fast1; $OTHER ip link set fast1 up
         for at in '' \"$OTHER\"; do
             $at ip link add docker0 type veth peer name nowhere
             $at ip address add 172.17.0.1/16 dev docker0; $at ip link set docker0 up
         done"
    );
    for (transport, variable, option, said) in [
        ("tcp-raw", "COMM_IFNAME=fast", "", "10.7.0.1 (fast0)"),
        ("tcp", "COMM_IFNAME=^docker,near,far,lo", "", "10.7.0.1 (fast0)"),
        ("quic", "COMM_IFNAME=docker", "--bind =fast0,fast1", "10.7.0.1 (fast0)"),
        ("tcp-raw", "COMM_IFNAME=^docker", "", "10.9.0.1 (near)"),
    ] {
        let folder = data();
        let script = format!("export COMM_PORT_RANGE=23000-23999 '{variable}'\n{}", ranks(transport, [option; 2]));
        let Some(output) = in_namespace(folder.path(), &setup, &script) else { return };
        let text = ["0.txt", "1.txt"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap());
        assert_eq!(output.stdout, b"0\n0\n", "{transport} {variable}: {text:?}");
        assert!(text[0].contains(&format!("network: rank 0 listens for data at {said}")), "{variable}: {}", text[0]);
        assert!(
            text[0].contains("job: rank 0 of 2 by COMM_RANK and COMM_WORLD_SIZE; rank 0 at 10.9.0.1:4000 by COMM_ADDR"),
            "{}",
            text[0]
        );
    }
}

#[test]
fn loopback_offered_to_another_machine_is_an_error_on_all_ranks_at_once() {
    for transport in ["tcp", "tcp-raw", "quic"] {
        let folder = data();
        let began = Instant::now();
        let script = ranks(transport, ["--timeout 50", "--timeout 50 --bind 127.0.0.1"]);
        let Some(output) = in_namespace(folder.path(), TWO_MACHINES, &script) else { return };
        assert!(began.elapsed() < Duration::from_secs(40), "{transport}: {:?}", began.elapsed());
        assert!(!said(&output).lines().any(|code| code == "0"), "{transport}: {}", said(&output));
        for name in ["0.txt", "1.txt"] {
            let text = fs::read_to_string(folder.path().join(name)).unwrap();
            let what = "rank 1 came from 10.9.0.2 but offers 127.0.0.1";
            assert!(text.contains(what) && text.contains("--bind"), "{transport}, {name}: {text}");
        }
    }
}

#[test]
fn an_address_that_cannot_be_reached_is_named_at_the_deadline() {
    // The other machine has the address, and nothing gets there.
    let setup = format!("{TWO_MACHINES}\n$OTHER ip address add 10.9.7.2/32 dev lo\nip route add blackhole 10.9.7.0/24");
    for transport in ["tcp", "tcp-raw", "quic"] {
        let folder = data();
        let script = ranks(transport, ["--timeout 4", "--timeout 4 --bind 10.9.7.2"]);
        let Some(output) = in_namespace(folder.path(), &setup, &script) else { return };
        let text = ["0.txt", "1.txt"].map(|name| fs::read_to_string(folder.path().join(name)).unwrap());
        assert!(!said(&output).lines().any(|code| code == "0"), "{transport}: {}", said(&output));
        // One of them dials: rank 0 the address that leads nowhere, or rank 1 rank 0, which then cannot answer.
        let named = |text: &String| text.contains("10.9.7.2:") || text.contains("10.9.0.1:");
        assert!(text.iter().any(named), "{transport}: {text:?}");
        assert!(text.iter().all(|text| text.contains("connecting over")), "{transport}: {text:?}");
    }
}

#[test]
fn a_machine_without_ipv4_trains() {
    let setup = "ip address del 127.0.0.1/8 dev lo";
    for transport in ["shm", "tcp", "tcp-raw", "quic"] {
        for bind in ["", "--bind ::1"] {
            let folder = data();
            let script = format!("unset COMM_WORLD_SIZE; {} {TRAIN} --nproc 2 --transport {transport} {bind}", gpt2());
            let Some(output) = in_namespace(folder.path(), setup, &script) else { return };
            assert!(output.status.success(), "{transport} {bind}: {}", said(&output));
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_reported() {
    let folder = data();
    let script = format!("COMM_RANK=0 {} {TRAIN} --transport tcp --timeout 5 --stall-after 0.5", gpt2());
    let setup = "export COMM_ADDR=127.0.0.1:4000";
    let Some(output) = in_namespace(folder.path(), setup, &script) else { return };
    let text = said(&output);
    let report = text.lines().find(|line| line.starts_with("stall: ")).expect(&text);
    assert!(report.contains("for rank 1, meeting 2 ranks at 127.0.0.1:4000"), "{text}");
    let script = script.replace("COMM_RANK=0", "COMM_RANK=1");
    let text = said(&in_namespace(folder.path(), setup, &script).unwrap());
    let report = text.lines().find(|line| line.starts_with("stall: ")).expect(&text);
    assert!(report.contains("for rank 0, dialling rank 0 at 127.0.0.1:4000"), "{text}");
}
