//! The whole page, of results that look real and of results that are odd.

mod judging;

use std::fs;
use std::path::{Path, PathBuf};

use rig::record::{InjectedDelay, Record, Status};

use super::synthetic::{cell, sweep};
use super::*;

fn results(records: Vec<Record>) -> Results {
    Results { file: PathBuf::new(), records, warnings: Vec::new(), whole_bytes: 0 }
}

/// The page's text, and how many pictures lie beside it.
fn written(records: Vec<Record>) -> (String, usize) {
    let folder = tempfile::tempdir().unwrap();
    let page = write(&results(records), folder.path()).unwrap();
    let html = fs::read_to_string(page).unwrap();
    let figures = fs::read_dir(folder.path().join(FIGURES)).unwrap().count();
    well_formed(&html);
    (html, figures)
}

/// Whether each element ends in the order in which it began, and nothing is loaded from elsewhere or run.
fn well_formed(html: &str) {
    let body = html.split_once("<body>").unwrap().1.split_once("</body>").unwrap().0;
    let mut open: Vec<&str> = Vec::new();
    for tag in body.split('<').skip(1) {
        let tag = tag.split_once('>').unwrap_or_else(|| panic!("no end of {tag:.60}")).0;
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        match tag {
            _ if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "in {open:?}"),
            _ if tag.ends_with('/') => {}
            _ => open.push(name),
        }
        assert!(!["script", "img", "iframe", "object", "link"].contains(&name), "{tag}");
        assert!(
            !tag.contains("src=") && !tag.contains("http") || tag.contains("xmlns=\"http://www.w3.org/2000/svg\""),
            "{tag}"
        );
    }
    assert!(open.is_empty(), "{open:?} not ended");
    for nonsense in ["NaN", ">inf", "null null", "{}", "−0.0 %"] {
        assert!(
            !body.contains(nonsense),
            "{nonsense} near {:?}",
            body.find(nonsense).map(|at| &body[at.saturating_sub(90)..at])
        );
    }
}

#[test]
fn a_sweep_becomes_a_page_with_all_sections() {
    let (html, figures) = written(sweep(&["tcp", "quic"], &[2, 4], 3));
    for section in ["strategy", "quic", "time", "trust", "more"] {
        let heading = html.contains(&format!("<h2 id=\"{section}\">"));
        assert!(heading && html.contains(&format!("href=\"#{section}\"")), "{section}");
    }
    for topic in ["ranking", "setup", "maps", "parts", "scaling", "curves", "loss", "why", "textbook", "traces"] {
        assert!(html.contains(&format!("<details class=\"topic\" id=\"{topic}\">")), "{topic}");
    }
    assert_eq!(html.matches("<svg").count(), figures);
    assert!(figures > 40, "{figures}");
    let said = [
        // The model's ddp hides what it sends, and its links are slow.
        "over tcp, ddp is the fastest with ",
        "Which strategy should I use on this link?",
        "Where the time of a step goes, over ",
        "Measured on 2026-",
        "<td class=\"name\">●\u{a0}ddp</td>",
        "<td>● 0.7",
        "QUIC under cubic, TCP under bbr",
        "bbr instead of cubic",
        "as long as fsdp;",
        "100.0 % of it for rank 2.",
        "1 of 113 cells failed: fsdp quic wan (4 ranks on ",
        "1 of 113 cells timed out: ps quic mobile (4 ranks on ",
        "rank 2 was lost while gathering &lt;block 3&gt;",
        "What was sent is not what the formula says: zero1 quic lan ranks 2.",
        "ranks share cores",
        "3.00× (3.20 MB and 9.60 MB)",
        "so that the embedding is 20.0 % of all",
    ];
    for text in said {
        assert!(html.contains(text), "`{text}` is not said");
    }
    assert!(!html.contains("DOES NOT HOLD"));
}

#[test]
fn the_answer_on_a_terminal_is_sentences_and_a_table() {
    let text = screen(&results(sweep(&["tcp", "quic"], &[2], 3)), &[]);
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let joined = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let said = joined(&text);
    assert!(said.contains("is fastest: a step takes ") && said.contains("The slowest is "), "{text}");
    assert!(
        said.contains("times as long.")
            && said.contains("QUIC compared with ZeroMQ over TCP, strategy by strategy: on "),
        "{text}"
    );
    assert!(text.contains("Step in ms over quic, and the share of it that waits for the network:"), "{text}");
    let holes = screen(&results(sweep(&["tcp", "quic"], &[2, 4], 3)), &[]);
    assert!(holes.contains("Without figures: 1 cell"), "{holes}");
    let few = screen(&results(sweep(&["tcp"], &[2], 1)), &[]);
    assert!(joined(&few).contains("after 1 round this may be chance"), "{few}");
    assert_eq!(screen(&results(Vec::new()), &[]), "No cell has figures.");
}

#[test]
fn cells_of_the_plan_that_were_not_reached_are_shown() {
    let mut records = sweep(&["tcp", "quic"], &[2], 3);
    let cells: Vec<Cell> = records.iter().map(|record| record.cell.clone()).collect();
    records.retain(|record| record.round == 1 && (record.cell.link != "mobile" || record.cell.transport != "quic"));
    let planned = PlannedRuns { rounds: 5, cells };
    let folder = Path::new("nowhere");
    let page = page(&results(records), &planned, folder, folder, None).finish("title");
    well_formed(&page);
    for text in ["cells not reached: ps quic mobile", ">not reached</text>", "The plan asks for 5 rounds"] {
        assert!(page.contains(text), "`{text}` is not said");
    }
}

#[test]
fn rungs_are_priced_and_what_is_not_available_is_told() {
    let mut records = sweep(&["null", "shm", "tcp-raw", "tcp", "quic-unprotected", "quic", "nccl"], &[2], 3);
    records.retain(|record| ["lan", "loopback"].contains(&record.cell.link.as_str()));
    let (html, _) = written(records);
    for text in [
        "The price of packet protection",
        "The price of moving bytes through memory",
        "by null&#39;s, at most",
        "not available",
    ] {
        assert!(html.contains(text), "`{text}` is not said");
    }
}

#[test]
fn two_rounds_are_too_few_to_claim_anything() {
    let (html, _) = written(sweep(&["tcp", "quic"], &[2], 2));
    assert!(html.contains("fewer than 3 good rounds"));
    // Of the sentences, not of what the details are called.
    let said: String = html.split("<li class=\"").skip(1).map(|item| item.split_once("</li>").unwrap().0).collect();
    for claim in ["is the fastest", "the shortest", "told apart", "comparisons", "as long as", "more than on", " ["] {
        assert!(!said.contains(claim), "`{claim}` is said of two rounds: {said}");
    }
    let body = html.split_once("<body>").unwrap().1;
    let interval = |text: &str| text.contains(" [") && !text.contains("[]");
    assert!(!body.split('<').any(|piece| piece.starts_with("td") && interval(piece)), "an interval of two rounds");
}

#[test]
fn differences_of_nothing_are_not_told_as_such() {
    // One cell's runs, as if they were two strategies'.
    let mut records = sweep(&["tcp"], &[2], 5);
    records.retain(|record| record.cell.strategy == "ddp" && record.cell.link == "lan");
    let twins: Vec<Record> =
        records.iter().map(|record| Record { cell: cell("ring", "tcp", "lan", 2), ..record.clone() }).collect();
    records.extend(twins);
    let (html, _) = written(records);
    assert!(html.contains("may be as fast") && !html.contains("is the fastest with"));
}

#[test]
fn cells_that_are_the_same_and_delays_that_were_planted_tell_of_the_method() {
    let one = sweep(&["tcp"], &[2], 5);
    let one = one.into_iter().filter(|record| record.cell.strategy == "ddp" && record.cell.link == "lan");
    let mut records: Vec<Record> = one.collect();
    let again: Vec<Record> = records.clone();
    for mut record in again.clone() {
        record.cell.variant = "again".into();
        records.push(record);
    }
    for (microseconds, slower) in [(5_000, 5.0), (9_000, 2.0)] {
        for mut record in again.clone() {
            record.cell.planted = Some(InjectedDelay { microseconds, rank: Some(1) });
            let ranks = record.measured.iter_mut().flat_map(|measured| &mut measured.ranks);
            ranks.for_each(|rank| rank.steps.total.iter_mut().for_each(|ms| *ms += slower));
            records.push(record);
        }
    }
    let (html, _) = written(records);
    for text in [
        "Of 1 pair of identical cells, 0 differ significantly",
        "5.00 ms were added to each step of rank 1, and 5.00 [",
        ": found.",
        "NOT the delay that was added",
    ] {
        assert!(html.contains(text), "`{text}` is not said");
    }
}

#[test]
fn nothing_one_cell_and_failures_alone_are_pages_too() {
    let (html, figures) = written(Vec::new());
    assert!(html.contains("there are no results in this folder") && figures == 0);
    let one: Vec<Record> =
        sweep(&["tcp"], &[2], 1).into_iter().filter(|record| record.cell.strategy == "ddp").take(1).collect();
    let (html, figures) = written(one);
    assert!(figures > 0 && html.contains("ddp") && !html.contains("is the fastest with"));
    let mut failed = sweep(&["tcp", "quic"], &[2], 2);
    for record in &mut failed {
        record.measured = None;
        record.status = Status::Failed("connection refused".into());
    }
    let (html, figures) = written(failed);
    assert!(html.contains("No cell has figures") && html.contains("connection refused") && figures > 0);
}

#[test]
fn names_and_errors_are_text_whatever_they_hold() {
    let evil = "</style></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u{0}";
    let long = "x".repeat(5_000);
    let mut records = sweep(&["tcp", "quic"], &[2], 3);
    for record in &mut records {
        for name in [&mut record.cell.strategy, &mut record.cell.transport, &mut record.cell.link, &mut record.plan] {
            name.push_str(evil);
        }
        record.cell.variant = long.clone();
        if record.round == 2 {
            record.cell.variant.push_str("../../etc/passwd");
            record.status = Status::Failed(evil.into());
        }
        if let Some(measured) = &mut record.measured {
            measured.link.description = evil.into();
            for rank in &mut measured.ranks {
                rank.operations.iter_mut().for_each(|operation| operation.label = evil.into());
                rank.network.connections.iter_mut().for_each(|connection| connection.congestion = evil.into());
                rank.network.missing = Some(evil.into());
            }
        }
    }
    let (html, _) = written(records);
    assert!(html.contains("&lt;script&gt;") && !html.contains("<script"));
}

#[test]
fn numbers_that_are_none_do_no_harm() {
    for odd in [f64::NAN, f64::INFINITY, -1.0, 0.0, f64::MAX] {
        let mut records = sweep(&["tcp"], &[2], 3);
        for measured in
            records.iter_mut().filter(|record| record.round != 2).filter_map(|record| record.measured.as_mut())
        {
            measured.losses.iter_mut().step_by(2).for_each(|loss| *loss = Some(odd));
            measured.losses[1] = None;
            measured.seconds[3] = odd;
            for rank in &mut measured.ranks {
                let steps = &mut rank.steps;
                for column in
                    [&mut steps.total, &mut steps.exposed, &mut steps.hidden, &mut steps.other, &mut steps.compute]
                {
                    column[4] = odd;
                }
                // A column that is too short.
                steps.skew.truncate(3);
                rank.payload_bytes = None;
                rank.waited_for = vec![odd];
                rank.operations[0].exposed = odd;
                for connection in &mut rank.network.connections {
                    connection.rtt_ms = odd;
                    connection.min_rtt_ms = Some(odd);
                }
            }
        }
        written(records);
    }
}

#[test]
fn a_page_elsewhere_links_back_to_the_traces() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (folder.path().join("data"), folder.path().join("pages"));
    fs::create_dir_all(data.join("traces")).unwrap();
    fs::create_dir_all(out.join(FIGURES)).unwrap();
    fs::write(data.join("traces/ddp tcp.json"), "{}").unwrap();
    fs::write(data.join("traces/notes.txt"), "").unwrap();
    // A picture of an earlier page goes, a reader's own stays.
    fs::write(out.join(FIGURES).join("99-old.svg"), "").unwrap();
    fs::write(out.join(FIGURES).join("mine.svg"), "").unwrap();
    let page = write_to(&results(sweep(&["tcp"], &[2], 1)), &data, &out.join("page.html")).unwrap();
    let html = fs::read_to_string(page).unwrap();
    assert!(html.contains("href=\"../data/traces/ddp%20tcp.json\"") && !html.contains("notes.txt"));
    let figures: Vec<String> = fs::read_dir(out.join(FIGURES))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(figures.contains(&"mine.svg".into()) && !figures.contains(&"99-old.svg".into()), "{figures:?}");
    assert!(!fs::read_to_string(out.join(FIGURES).join(&figures[0])).unwrap().contains("var("));
    let nowhere = write_to(&results(Vec::new()), Path::new("nowhere"), Path::new("/dev/null/page.html")).unwrap_err();
    assert!(nowhere.contains("/dev/null"), "{nowhere}");
}

#[test]
fn rows_of_collectives_are_drawn_where_there_are_some() {
    let folder = tempfile::tempdir().unwrap();
    let row = |transport: &str, size: u64, place: &str| {
        format!(
            "{{\"transport\":\"{transport}\",\"operation\":\"AllReduce\",\"type\":\"f32\",\"redop\":\"sum\",\"ranks\":2,\"size\":{size},{place}}}\n"
        )
    };
    let figures = "\"in_place\":{\"time_us\":50.0,\"min_us\":40.0,\"max_us\":60.0,\"busbw\":1.5}";
    let missing = "\"in_place\":{\"missing\":\"no GPU\",\"failed\":false}";
    let text =
        [row("tcp", 1024, figures), row("tcp", 1 << 20, figures), row("nccl", 1024, missing), "[not json\n".into()]
            .concat();
    fs::write(folder.path().join("collectives.jsonl"), text).unwrap();
    let html = fs::read_to_string(write(&results(Vec::new()), folder.path()).unwrap()).unwrap();
    assert!(
        html.contains("Time over size: AllReduce, f32, sum, 2 ranks")
            && html.contains("1.05 MB")
            && !html.contains("nccl")
    );
    well_formed(&html);
    fs::write(folder.path().join("collectives.jsonl"), "{}\n").unwrap();
    let html = fs::read_to_string(write(&results(Vec::new()), folder.path()).unwrap()).unwrap();
    assert!(html.contains("No row of collectives.jsonl has"));
}
