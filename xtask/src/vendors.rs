//! Core, program and Python name no vendor: a backend brings its names, variables, texts and checks with it.
//!
//! Otherwise a backend of another crate would need a change of this workspace. The test reads the code; documentation may cite a
//! vendor's rule as a reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};

use crate::layers::{is_tests, skipped};
use crate::workspace::root;

/// The folders that name no vendor.
const FOLDERS: [&str; 4] = ["ipc-core/src", "cli/src", "python/src", "python/python/device_ipc"];

/// Names that other projects have given to their interfaces: array and stream protocols of Python, and a constant of `dlpack.h`.
const INTERFACES: [&str; 4] =
    ["__cuda_array_interface__", "cuda_array_interface", "__cuda_stream__", "KDL_CUDA"];

/// Files that adapt to a framework's own module for one vendor, with the reason.
const ADAPTERS: [(&str, &str); 3] = [
    ("python/src/torch_pool.rs", "PyTorch has pools of memory for CUDA only, `torch.cuda.MemPool`"),
    ("python/python/device_ipc/_torch_pool.py", "likewise"),
    (
        "python/python/device_ipc/_streams.py",
        "CuPy and numba have modules for CUDA only, `cupy.cuda` and `numba.cuda`",
    ),
];

/// Names of vendors, of their products and of their libraries.
const NAMES: [&str; 11] =
    ["cuda", "nvidia", "nvrm", "ascend", "npu", "acl", "cann", "huawei", "davinci", "rocm", "amd"];

/// Returns the vendors' names in a text. A name is a whole word, or the beginning of one in camel or snake case.
fn names(text: &str) -> Vec<String> {
    let text = INTERFACES.iter().fold(text.to_owned(), |text, interface| text.replace(interface, ""));
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

/// Returns the lines of Python without comments and docstrings, with their numbers.
fn lines_of_python(text: &str) -> Vec<(usize, &str)> {
    let mut lines = Vec::new();
    let (mut in_docstring, mut in_text) = (false, false);
    for (index, line) in text.lines().enumerate() {
        let code = line.trim_start();
        // A text of one line has both of its quotes there.
        let toggles = code.matches("\"\"\"").count() % 2 == 1;
        let is_docstring = in_docstring || !in_text && code.starts_with("\"\"\"");
        if is_docstring {
            in_docstring ^= toggles;
            continue;
        }
        in_text ^= toggles;
        if in_text || !code.starts_with('#') {
            lines.push((index + 1, line.split("  # ").next().unwrap_or_default()));
        }
    }
    lines
}

fn named_in_python(file: &str, text: &str) -> Vec<String> {
    let named = lines_of_python(text).into_iter().filter(|(_, line)| !names(line).is_empty());
    named.map(|(number, line)| format!("{file}:{number}: {}", line.trim())).collect()
}

/// Returns the files of a folder whose code may not name a vendor.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path
            .extension()
            .is_some_and(|extension| ["rs", "py", "pyi"].iter().any(|one| extension == *one))
        {
            found.push(path);
        }
    }
}

#[test]
fn core_program_and_python_name_no_vendor() {
    let mut named = Vec::new();
    for folder in FOLDERS {
        let mut found = Vec::new();
        files(&root().join(folder), &mut found);
        assert!(found.len() > 20, "{folder} has only {} files", found.len());
        for path in found {
            let file = path.strip_prefix(root()).unwrap().to_str().unwrap();
            if is_tests(file) || ADAPTERS.iter().any(|(adapter, _)| *adapter == file) {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            named.extend(if file.ends_with(".rs") {
                named_in(file, &text)
            } else {
                named_in_python(file, &text)
            });
        }
    }
    assert!(named.is_empty(), "the backend has to bring these names:\n{}", named.join("\n"));
}

#[test]
fn adapters_exist() {
    for (file, _) in ADAPTERS {
        assert!(root().join(file).is_file(), "{file} does not exist");
    }
}

#[test]
fn vendor_names_are_found_in_python() {
    let code = "\"\"\"cuda\"\"\"\ndef f():\n    \"\"\"For CUDA\n\n    and NPUs.\n    \"\"\"\n    # cuda\n    x = torch.cuda  # cuda\n    \
                y = __cuda_stream__\nTEXT = \"\"\"\nnpu\n\"\"\"\nz = acl\n";
    assert_eq!(named_in_python("a.py", code), ["a.py:8: x = torch.cuda", "a.py:11: npu", "a.py:13: z = acl"]);
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
