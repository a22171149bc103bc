//! Ctrl-C in tests that a script may have started in its background, where it is ignored, and what was started there would ignore it as well.
//! Every crate's tests that send it take this.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]
#![allow(dead_code, reason = "each test program uses a part")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

/// What `command` starts ends at Ctrl-C.
pub(crate) fn heeded(command: &mut Command) -> &mut Command {
    let restore = || {
        // SAFETY: `signal` may be called between fork and exec, and no handler is installed.
        let before = unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the function allocates nothing and takes no lock.
    unsafe { command.pre_exec(restore) }
}

/// As from a terminal; the status with which `child` ends.
pub(crate) fn press(child: &mut Child) -> ExitStatus {
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    child.wait().unwrap()
}
