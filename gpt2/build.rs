//! Finds out the Git commit for `gpt2::build::COMMIT`; without one the build goes on.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=ISOCOMM_COMMIT");
    let given = std::env::var("ISOCOMM_COMMIT").ok().filter(|commit| !commit.is_empty());
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // A debug build would be made anew for each commit.
    if let Some(commit) = given.or_else(|| is_release.then(from_git).flatten()) {
        println!("cargo::rustc-env=GPT2_BUILD_COMMIT={commit}");
    }
}

/// The commit of the repository that this file belongs to. A package that was unpacked inside of another repository belongs to none.
fn from_git() -> Option<String> {
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    // What changes with a commit.
    let head = git(&["symbolic-ref", "-q", "HEAD"]);
    for name in ["HEAD", "packed-refs"].into_iter().chain(head.as_deref()) {
        let path = git(&["rev-parse", "--git-path", name])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "HEAD"]).filter(|commit| commit.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// What Git says on its first line; `None` where there is none, or it refuses.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.lines().next()?.to_owned())
}
