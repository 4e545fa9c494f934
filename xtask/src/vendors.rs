//! Core, program and Python name no vendor: a backend brings its names, variables, texts and checks with it.
//!
//! Otherwise a backend of another crate would need a change of this workspace. The test reads the code; documentation may cite a
//! vendor's rule as a reason.

use std::fs;
use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};

use crate::layers::{is_tests, rust_files, skipped};
use crate::workspace::root;

/// The folders that name no vendor.
const FOLDERS: [&str; 2] = ["ipc-core/src", "cli/src"];

/// Names of vendors, of their products and of their libraries.
const NAMES: [&str; 11] =
    ["cuda", "nvidia", "nvrm", "ascend", "npu", "acl", "cann", "huawei", "davinci", "rocm", "amd"];

/// Returns the vendors' names in a text. A name is a whole word, or the beginning of one in camel or snake case.
fn names(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = ' ';
    for character in text.chars() {
        let begins = !character.is_ascii_alphabetic()
            || (character.is_ascii_uppercase() && !before.is_ascii_uppercase());
        if begins {
            words.push(String::new());
        }
        if character.is_ascii_alphabetic() {
            words.last_mut().expect("there is one").push(character.to_ascii_lowercase());
        }
        before = character;
    }
    words.retain(|word| NAMES.contains(&word.as_str()));
    words
}

/// Collects the identifiers and literals of code that is compiled without `test`, with their lines; not the documentation.
fn tokens_of(tokens: TokenStream, found: &mut Vec<(usize, String)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if let Some(behind) = skipped(&tokens, at) {
            at = behind;
            continue;
        }
        match &tokens[at] {
            TokenTree::Group(group) => {
                let first = group.stream().into_iter().next();
                if !matches!(first, Some(TokenTree::Ident(word)) if word == "doc") {
                    tokens_of(group.stream(), found);
                }
            }
            TokenTree::Punct(_) => {}
            token => found.push((token.span().start().line, token.to_string())),
        }
        at += 1;
    }
}

fn named_in(file: &str, text: &str) -> Vec<String> {
    let code = TokenStream::from_str(text).unwrap_or_else(|error| panic!("{file}: {error}"));
    let mut tokens = Vec::new();
    tokens_of(code, &mut tokens);
    let named = tokens.into_iter().filter(|(_, token)| !names(token).is_empty());
    named.map(|(line, token)| format!("{file}:{line}: {token}")).collect()
}

#[test]
fn core_and_program_name_no_vendor() {
    let mut named = Vec::new();
    for folder in FOLDERS {
        let mut files = Vec::new();
        rust_files(&root().join(folder), &mut files).unwrap();
        for path in files {
            let file = path.strip_prefix(root()).unwrap().to_str().unwrap();
            if !is_tests(file) {
                named.extend(named_in(file, &fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(named.is_empty(), "the backend has to bring these names:\n{}", named.join("\n"));
}

#[test]
fn vendor_names_are_found_in_identifiers_and_texts() {
    let code = "/// cuda\nfn f() { let cuda_stream = NPU; \"the CUDA driver\"; AclError; CannotOpen; oracle() }\n\
                #[cfg(test)]\nmod tests { const A: &str = \"cuda\"; }";
    let found = named_in("a.rs", code);
    assert_eq!(
        found,
        ["a.rs:2: cuda_stream", "a.rs:2: NPU", "a.rs:2: \"the CUDA driver\"", "a.rs:2: AclError"]
    );
}
