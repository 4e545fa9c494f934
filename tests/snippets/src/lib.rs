//! The Rust of the pages, compiled where a test names it, so that a page needs no second copy of its examples.

use std::path::Path;

use proc_macro::{Delimiter, Group, TokenStream, TokenTree};

/// Expands to a block of Rust of a page: `snippet!("docs/guide/ring.md", 2)` is the second one. It sees the variables of its place.
///
/// # Panics
///
/// If there is no such block.
#[proc_macro]
pub fn snippet(input: TokenStream) -> TokenStream {
    let words: Vec<_> = input.into_iter().map(|token| token.to_string()).collect();
    let [page, _, number] = &words[..] else { panic!("expected a page and a number, found {words:?}") };
    let number: usize = number.parse().expect("a number");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(page.trim_matches('"'));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let block = text.split("\n```rust\n").nth(number).and_then(|block| block.split("\n```").next());
    let block = block.unwrap_or_else(|| panic!("{page} has no block {number} of Rust"));
    // The compiler watches the page.
    let watched = format!("const _: &str = include_str!({:?});", path.canonicalize().expect("it was read"));
    let parse = |rust: &str| rust.parse::<TokenStream>().unwrap_or_else(|error| panic!("{page}: {error}"));
    let statements = TokenStream::from_iter([parse(&watched), parse(block)]);
    // A page ends a function with an expression, or stands among its statements.
    let ends = |tokens: TokenStream| matches!(tokens.into_iter().last(), Some(TokenTree::Punct(mark)) if mark.as_char() == ';');
    if ends(parse(block)) {
        statements
    } else {
        TokenTree::from(Group::new(Delimiter::Brace, statements)).into()
    }
}
