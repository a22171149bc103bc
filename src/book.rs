//! The Rust code of the README and of the book in `docs`, as documentation tests.

#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/src/library.md")]
struct Pages;
