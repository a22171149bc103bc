//! `gpt2 train --metrics` while it trains, asked by friends and others.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::cli::refused;
use crate::common::{lines, wait_for};

const LONG: Duration = Duration::from_secs(60);

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&address, LONG).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// What is answered to `request`.
fn ask(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(request).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    String::from_utf8(answer).unwrap()
}

fn get(address: SocketAddr, path: &str) -> String {
    ask(address, format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").as_bytes())
}

fn value(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.split(' ').next() == Some(name));
    line.unwrap_or_else(|| panic!("no {name} in {metrics}")).rsplit(' ').next().unwrap().parse().unwrap()
}

fn command(arguments: &str, folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(arguments.split(' ')).current_dir(folder).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const TRAIN: &str = "train --strategy ddp --transport tcp-raw --nproc 2 --preset micro --tokenizer bytes --data text.txt --batch 4 --threads 1 --eval-every 0";

#[test]
fn a_run_answers_while_it_trains_and_strangers_do_not_disturb_it() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("text.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(100)).unwrap();
    let mut job =
        command(&format!("{TRAIN} --steps 1000000 --log-every 1 --metrics 127.0.0.1:0"), folder).spawn().unwrap();
    let said = lines(&mut job);
    let address: SocketAddr = loop {
        let (_, line) = said.recv_timeout(LONG).unwrap();
        if let Some((_, rest)) = line.split_once("metrics: http://") {
            break rest.trim_end_matches("/metrics").parse().unwrap();
        }
    };
    wait_for(&said, "step     3/1000000", LONG).unwrap();
    let answer = get(address, "/metrics");
    let (head, metrics) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", metrics.len())), "{head}");
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.starts_with("gpt2_") && line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
    }
    assert!(metrics.contains("strategy=\"ddp\",transport=\"tcp-raw\""), "{metrics}");
    assert!((1.0..10.0).contains(&value(metrics, "gpt2_loss")) && value(metrics, "gpt2_tokens_per_second") > 0.0);
    for name in ["gpt2_sent_bytes_total", "gpt2_step_seconds", "gpt2_exposed_communication_seconds"] {
        assert!(value(metrics, name) > 0.0, "{name}");
    }
    assert_eq!((value(metrics, "gpt2_steps"), value(metrics, "gpt2_restarts_total")), (1e6, 0.0));

    // More connections than there may be that say nothing, or not enough: the oldest are closed.
    let idle: Vec<TcpStream> = (0..40).map(|_| connect(address)).collect();
    let mut slow = connect(address);
    let _ = slow.write_all(b"GET /metr");
    for (request, expected) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (&b"POST /metrics HTTP/1.1\r\n\r\n"[..], "405"),
        (&b"GET /metrics HTTP/9\r\n\r\n"[..], "400"),
        (&b"\x16\x03\x01\x02\0\x01\0\n\n"[..], "400"),
        (&b"GET  /metrics HTTP/1.1\r\n\r\n"[..], "400"),
        (&b"GET /metrics?x=1 HTTP/1.0\n\n"[..], "200"),
    ] {
        let answer = ask(address, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {expected} ")), "{}: {answer}", request.escape_ascii());
    }
    let endless = ask(address, &[b"GET /", "x".repeat(1 << 20).as_bytes()].concat());
    assert!(endless.starts_with("HTTP/1.1 431"), "{endless}");
    drop(idle);
    let step = |metrics: &str| value(metrics, "gpt2_step");
    let before = step(metrics);
    let healthy = get(address, "/health");
    assert!(healthy.starts_with("HTTP/1.1 200") && healthy.contains("of 1000000 ended"), "{healthy}");
    assert!(step(&get(address, "/metrics")) > before, "no step meanwhile");
    job.kill().unwrap();
    job.wait().unwrap();

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    // Whoever trains, before the text is looked for, and no start is a restart.
    for ranks in ["", " --nproc 2 --strategy ddp --max-restarts 3"] {
        let arguments = format!(
            "train --preset micro --tokenizer bytes --data none.txt --out other --metrics 127.0.0.1:{port}{ranks}"
        );
        let said = refused(&arguments.split(' ').collect::<Vec<_>>(), folder);
        assert!(said.contains(&format!("--metrics 127.0.0.1:{port}: cannot listen on it")), "{said}");
        assert!(!said.contains("restart"), "{said}");
    }
}
