//! How ranks meet where names and addresses are not what they are on this machine: each test runs again, alone, in a network namespace
//! with files of its own in place of `/etc/hosts` and `/etc/resolv.conf`. Where the system does not allow that, it says that it was skipped.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::Control;
use comm_core::control::{MissingRanksReport, TcpControl};
use comm_core::job::{Address, Job};

use crate::common::{after, job, options, texts};

/// Which test this process is to be, alone, and the folder of its files.
const INSIDE: &str = "NETWORKS_TEST";
const FOLDER: &str = "NETWORKS_TEST_FOLDER";

/// What is run in the namespace before the test itself, which `$@` is; `$SETUP` is the test's own part.
const SCRIPT: &str = r#"set -e
ip link set lo up
for file in hosts resolv.conf nsswitch.conf; do
    [ -e /etc/$file ] || continue
    mount --bind "$NETWORKS_TEST_FOLDER/$file" /etc/$file
done
eval "$SETUP"
exec "$@"
"#;

/// Runs the test called `name` again in a namespace, with these lines of `/etc/hosts`, after the `setup` in shell. True inside of it:
/// the test has to go on.
fn is_inside(name: &str, hosts: &str, setup: &str) -> bool {
    match std::env::var(INSIDE) {
        Ok(inside) => return inside == name,
        Err(_) => println!("{name} goes on in a network namespace"),
    }
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts"), hosts).unwrap();
    fs::write(folder.path().join("resolv.conf"), "nameserver 127.0.0.1\noptions timeout:5 attempts:2\n").unwrap();
    fs::write(folder.path().join("nsswitch.conf"), "hosts: files dns\n").unwrap();
    let namespace = || {
        let mut command = Command::new("unshare");
        // Without root's rights only in a user namespace, where that is allowed.
        if fs::read_to_string("/proc/self/status").unwrap().lines().any(|line| line.starts_with("Uid:\t0\t")) {
            command.args(["--mount", "--net"]);
        } else {
            command.args(["--user", "--map-root-user", "--mount", "--net"]);
        }
        command.args(["--", "sh", "-c", SCRIPT, "sh"]).env(FOLDER, folder.path());
        command
    };
    match namespace().env("SETUP", setup).arg("true").output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            println!("skipped: no network namespace: {}", String::from_utf8_lossy(&output.stderr));
            return false;
        }
        Err(error) => {
            println!("skipped: no program `unshare`: {error}");
            return false;
        }
    }
    let output = namespace()
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("networks::{name}"), "--nocapture"])
        .env(INSIDE, name)
        .env("SETUP", setup)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    println!("{said}");
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

fn named(host: &str, port: u16) -> Address {
    Address::Tcp { host: host.into(), port }
}

/// Connects and leaves again; the addresses of rank 0's end.
fn meet(job: &Job, report: &dyn Fn(&MissingRanksReport)) -> Option<SocketAddr> {
    let stall_after = Some(Duration::from_millis(50));
    let control = TcpControl::connect_watched(job, &[], options(), after(30_000), (stall_after, report)).unwrap();
    let listening = control.listening();
    control.leave(after(10_000)).unwrap();
    listening
}

#[test]
fn a_name_server_that_is_silent_holds_nobody_beyond_the_deadline() {
    if !is_inside("a_name_server_that_is_silent_holds_nobody_beyond_the_deadline", "", "") {
        return;
    }
    let _silent = std::net::UdpSocket::bind("127.0.0.1:53").unwrap();
    let began = Instant::now();
    let jobs = [0, 1].map(|rank| job(rank, 2, &named("nowhere.test", 4000)));
    let errors = texts(crate::common::run(&jobs, |job| TcpControl::connect_with(job, &[], options(), after(500))));
    // The system itself waits for ten seconds.
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    for error in errors {
        assert!(error.contains("looking up nowhere.test: no answer yet") && error.contains("0.5 s"), "{error}");
    }
}

#[test]
fn a_name_may_appear_late_on_every_rank() {
    if !is_inside("a_name_may_appear_late_on_every_rank", "127.0.0.1 localhost\n", "") {
        return;
    }
    let jobs = [0, 1].map(|rank| job(rank, 2, &named("late.test", 4000)));
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        for job in &jobs {
            let tell = tell.clone();
            scope.spawn(move || meet(job, &|report| tell.send(report.clone()).unwrap()));
        }
        let mut waiting = [None, None];
        while waiting.iter().any(Option::is_none) {
            let report = told.recv_timeout(Duration::from_secs(20)).unwrap();
            waiting[report.rank] = Some(report.to_string());
        }
        let [first, second] = waiting.map(Option::unwrap);
        assert!(first.contains("for rank 1, not yet listening at late.test:4000: looking up late.test"), "{first}");
        assert!(second.contains("for rank 0, dialling rank 0 at late.test:4000"), "{second}");
        let hosts = std::env::var(FOLDER).unwrap() + "/hosts";
        fs::OpenOptions::new().append(true).open(hosts).unwrap().write_all(b"127.0.0.3 late.test\n").unwrap();
    });
}

#[test]
fn a_stranger_at_one_address_of_a_name_is_not_the_end() {
    let name = "a_stranger_at_one_address_of_a_name_is_not_the_end";
    if !is_inside(name, "::1 two\n127.0.0.1 two\n", "") {
        return;
    }
    let stranger = TcpListener::bind("[::1]:4000").unwrap();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        for stream in stranger.incoming() {
            let _ = stream.unwrap().write_all(b"220 mail.example ESMTP\r\n");
            let _ = tell.send(());
        }
    });
    let jobs = [0, 1].map(|rank| job(rank, 2, &named("two", 4000)));
    thread::scope(|scope| {
        // Rank 0 is not there yet when rank 1 meets the stranger, whom it then meets again.
        scope.spawn(|| meet(&jobs[1], &|_| ()));
        told.recv_timeout(Duration::from_secs(20)).unwrap();
        told.recv_timeout(Duration::from_secs(20)).unwrap();
        let listening = scope.spawn(|| meet(&jobs[0], &|_| ())).join().unwrap();
        assert_eq!(listening, Some("127.0.0.1:4000".parse().unwrap()));
    });
    // Once all addresses have been tried, and are strangers', it is.
    let _other = TcpListener::bind("127.0.0.1:4001").unwrap();
    let strangers = ["127.0.0.1:4002", "[::1]:4002"].map(|at| TcpListener::bind(at).unwrap());
    for stranger in strangers {
        thread::spawn(move || drop(stranger.accept().unwrap().0.write_all(b"220 mail.example ESMTP\r\n")));
    }
    let began = Instant::now();
    let error = TcpControl::connect_with(&job(1, 2, &named("two", 4002)), &[], options(), after(30_000)).unwrap_err();
    assert!(error.to_string().contains("not rank 0 of this job"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn rank_0_listens_at_every_address_of_its_name() {
    let setup = "ip address add 10.9.9.1/32 dev lo; ip -6 address add fd00::9/128 dev lo nodad";
    let hosts = "127.0.1.1 own\n10.9.9.1 own\nfd00::9 own\n192.0.2.7 own\n";
    if !is_inside("rank_0_listens_at_every_address_of_its_name", hosts, setup) {
        return;
    }
    let jobs = [0, 1].map(|rank| job(rank, 2, &named("own", 4000)));
    thread::scope(|scope| {
        let rank0 = scope.spawn(|| meet(&jobs[0], &|_| ()));
        for address in ["10.9.9.1:4000", "[fd00::9]:4000"] {
            while TcpStream::connect(address).is_err() {
                assert!(!rank0.is_finished());
                thread::sleep(Duration::from_millis(5));
            }
        }
        // Not the one that the machine gives itself, since there are others.
        assert!(TcpStream::connect("127.0.1.1:4000").is_err());
        meet(&jobs[1], &|_| ());
        assert!(!rank0.join().unwrap().unwrap().ip().is_loopback());
    });
}

#[test]
fn rank_0_whose_port_is_taken_does_not_listen_on_loopback_instead() {
    let name = "rank_0_whose_port_is_taken_does_not_listen_on_loopback_instead";
    if !is_inside(name, "10.9.9.1 own\n127.0.1.1 own\n", "ip address add 10.9.9.1/32 dev lo") {
        return;
    }
    let _taken = TcpListener::bind("10.9.9.1:4000").unwrap();
    let began = Instant::now();
    let connected = TcpControl::connect_with(&job(0, 2, &named("own", 4000)), &[], options(), after(60_000));
    let error = connected.unwrap_err().to_string();
    assert!(error.contains("10.9.9.1:4000") && error.contains("in use"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(20), "it waited for the others");
}

#[test]
fn a_name_that_is_loopback_here_is_said_to_be_out_of_reach_for_others() {
    let name = "a_name_that_is_loopback_here_is_said_to_be_out_of_reach_for_others";
    if !is_inside(name, "127.0.0.1 localhost\n127.0.1.1 debian\n", "") {
        return;
    }
    let error = TcpControl::connect_with(&job(0, 2, &named("debian", 4000)), &[], options(), after(300)).unwrap_err();
    for part in ["listening at 127.0.1.1:4000", "ranks on other machines cannot reach that", "/etc/hosts"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn rank_0_of_a_job_on_several_machines_listens_where_they_reach_it() {
    let name = "rank_0_of_a_job_on_several_machines_listens_where_they_reach_it";
    let setup = "ip address add 10.9.9.1/32 dev lo; ip link add decoy type veth peer name other; \
                 ip address add 10.9.8.1/24 dev decoy; ip link set decoy up";
    if !is_inside(name, "127.0.1.1 own\n10.9.9.1 others\n", setup) {
        return;
    }
    let first = |bind: Option<&str>, host: &str| {
        let mut job = job(0, 2, &named(host, 4000));
        job.network.across_hosts = true;
        job.network.bind = bind.map(|bind| bind.parse().unwrap());
        job.found.address = "SLURM_JOB_NODELIST".into();
        job
    };
    for (bind, host) in [(None, "own"), (Some("=no-such"), "own")] {
        let began = Instant::now();
        let connected = TcpControl::connect_with(&first(bind, host), &[], options(), after(30_000));
        let error = connected.unwrap_err().to_string();
        for part in ["by SLURM_JOB_NODELIST", "only 127.0.", "COMM_IFNAME", "COMM_ADDR"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        assert!(began.elapsed() < Duration::from_secs(10), "it waited for the others");
    }
    // Loopback by its numbers is meant.
    let by_number = TcpControl::connect_with(&first(None, "127.0.0.1"), &[], options(), after(300));
    let error = by_number.unwrap_err();
    assert!(matches!(error, comm_core::Error::Timeout { .. }), "{error}");
    // Not on the decoy, and where the others, to whom the name leads elsewhere, look for it.
    for bind in ["lo", "10.9.9.1"] {
        thread::scope(|scope| {
            let rank0 = scope.spawn(|| meet(&first(Some(bind), "own"), &|_| ()));
            meet(&job(1, 2, &named("others", 4000)), &|_| ());
            assert_eq!(rank0.join().unwrap(), Some("10.9.9.1:4000".parse().unwrap()), "{bind}");
        });
    }
}

#[test]
fn a_machine_without_ipv4_has_a_loopback_too() {
    if !is_inside("a_machine_without_ipv4_has_a_loopback_too", "::1 localhost\n", "ip address del 127.0.0.1/8 dev lo") {
        return;
    }
    assert!(TcpListener::bind("127.0.0.1:0").is_err());
    let folder = tempfile::tempdir().unwrap();
    let address = Address::File(folder.path().join("address"));
    let jobs = [0, 1].map(|rank| job(rank, 2, &address));
    let own = crate::common::run(&jobs, |job| {
        let control = TcpControl::connect_with(job, &[], options(), after(20_000)).unwrap();
        let own = control.local_address().unwrap().ip();
        assert_eq!(comm_core::location::bind_address(None, &*control).unwrap(), SocketAddr::new(own, 0));
        control.leave(after(10_000)).unwrap();
        own.to_string()
    });
    assert_eq!(own, ["::1", "::1"]);
    let alone = comm_core::local::group(1, 1);
    assert_eq!(comm_core::location::bind_address(None, &*alone[0].control).unwrap().to_string(), "[::1]:0");
}

#[test]
fn link_local_addresses_can_be_listened_on() {
    let setup = "ip link add here type veth peer there; ip link set here up; ip link set there up; \
                 ip -6 address add fe80::7/64 dev here nodad";
    if !is_inside("link_local_addresses_can_be_listened_on", "", setup) {
        return;
    }
    let control = &comm_core::local::group(1, 1)[0].control;
    let asked = "fe80::7".parse().unwrap();
    let own = comm_core::location::bind_address(Some(&asked), &**control).unwrap();
    let SocketAddr::V6(v6) = own else { panic!("{own}") };
    assert_ne!(v6.scope_id(), 0);
    TcpListener::bind(own).unwrap();
    // And to meet at, with its interface.
    let jobs = [0, 1].map(|rank| job(rank, 2, &Address::parse("[fe80::7%here]:4000").unwrap()));
    crate::common::run(&jobs, |job| meet(job, &|_| ()));
}

#[test]
fn rank_0_without_descriptors_for_all_says_so_at_once() {
    let name = "rank_0_without_descriptors_for_all_says_so_at_once";
    if std::env::var(INSIDE).is_err() {
        let output = Command::new("sh")
            .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &format!("networks::{name}"), "--nocapture"])
            .env(INSIDE, name)
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let began = Instant::now();
    let first = job(0, 100, &crate::common::free_address().0);
    let error = TcpControl::connect_with(&first, &[], options(), after(30_000)).unwrap_err().to_string();
    for part in ["between 100 ranks", "needs 99 file descriptors", "64 are allowed", "ulimit -n"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}
