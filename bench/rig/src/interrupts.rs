//! Signals that are none of a system call's business.

use std::io::{self, ErrorKind};

/// Makes a system call again as long as signals interrupt it. Linux does not by itself where a socket has a time limit, and the end of any
/// child of this process is such a signal.
///
/// # Errors
/// The call's own.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_made_until_it_is_through() {
        let mut outcomes = vec![Ok(3), Err(ErrorKind::Interrupted.into()), Err(ErrorKind::Interrupted.into())];
        assert_eq!(uninterrupted(|| outcomes.pop().unwrap()).unwrap(), 3);
        let refused = uninterrupted(|| Err::<(), _>(ErrorKind::ConnectionRefused.into()));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
