//! Pages for maintainers name files and identifiers that exist: a renamed lock or function is renamed there too.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

const ARCHITECTURE: &str = include_str!("../../../docs/architecture.md");

/// Names of the kernel that no code of the workspace spells like this.
const KERNEL: [&str; 2] = ["SCM_RIGHTS", "SOCK_SEQPACKET"];

#[test]
fn architecture_page_names_files_that_exist() {
    let files = sources();
    for name in code(ARCHITECTURE).filter(|code| code.ends_with(".rs") && !code.contains(' ')) {
        let exists = files.iter().any(|file| file.ends_with(name));
        assert!(exists, "docs/architecture.md names {name}, which does not exist");
    }
}

#[test]
fn architecture_page_names_words_of_the_code() {
    let words = Sources::read().words;
    for name in code(ARCHITECTURE) {
        let name = name.strip_suffix("()").unwrap_or(name);
        let other = name.contains(|c: char| !is_word(c)) || KERNEL.contains(&name);
        // Names of folders and prefixes have no capital and no underscore within.
        let identifier = name.contains(char::is_uppercase) || name.trim_end_matches('_').contains('_');
        let exists = other || !identifier || words.contains(name);
        assert!(exists, "docs/architecture.md names `{name}`, which no Rust file of the workspace contains");
    }
}

#[test]
fn maintainers_pages_name_members_that_exist() {
    let sources = Sources::read();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![folder.join("CONTRIBUTING.md")];
    for folder in [folder.join("docs"), folder.join("docs/spec")] {
        let entries = fs::read_dir(folder).expect("a folder of pages").flatten();
        pages.extend(
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "md")),
        );
    }
    let mut missing = Vec::new();
    for page in pages {
        let text = fs::read_to_string(&page).expect("a page");
        for name in code(&text) {
            let mut parts = name.strip_suffix("()").unwrap_or(name).rsplit("::");
            let (Some(member), Some(owner)) = (parts.next(), parts.next()) else { continue };
            let both = [member, owner].iter().all(|part| !part.is_empty() && part.chars().all(is_word));
            if both && owner.starts_with(char::is_uppercase) && !sources.declare(owner, member) {
                missing.push(format!("{}: {owner}::{member}", page.display()));
            }
        }
    }
    assert!(missing.is_empty(), "no such field, variant, constant or function:\n{}", missing.join("\n"));
}

/// Returns the spans of code in a page: text between two backticks in one line.
fn code(page: &str) -> impl Iterator<Item = &str> {
    page.lines().flat_map(|line| line.split('`').skip(1).step_by(2))
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The declarations of the workspace, as far as their text shows them: the files are formatted by rustfmt.
#[derive(Default)]
struct Sources {
    /// The words of the code, without comments.
    words: HashSet<String>,
    /// The text of each declaration and implementation, by the names in its first line.
    blocks: HashMap<String, Vec<String>>,
    /// The types that aliases stand for.
    aliases: HashMap<String, String>,
}

impl Sources {
    fn read() -> Self {
        let mut found = Self::default();
        for file in sources() {
            let text = fs::read_to_string(file).expect("a Rust file");
            let lines: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
            let words = lines.iter().flat_map(|line| line.split(|c| !is_word(c)));
            found.words.extend(words.filter(|word| !word.is_empty()).map(str::to_owned));
            for (index, line) in lines.iter().enumerate() {
                found.add(line, &lines[index..]);
            }
        }
        found
    }

    /// Adds the declaration that begins with a line, if one does.
    fn add(&mut self, line: &str, rest: &[&str]) {
        let declaration = without_visibility(line);
        let mut words = declaration.split(|c| !is_word(c)).filter(|word| !word.is_empty());
        match words.next() {
            Some("type") => {
                if let (Some(name), Some(target)) = (words.next(), words.next()) {
                    self.aliases.insert(name.to_owned(), target.to_owned());
                }
            }
            Some("struct" | "enum" | "union" | "trait" | "impl") => {
                let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
                let single = declaration.ends_with([';', '}']);
                let last = if single { 0 } else { rest.iter().position(|line| *line == end).unwrap_or(0) };
                let block = rest[..=last].join("\n");
                for name in words.filter(|word| word.starts_with(char::is_uppercase)) {
                    self.blocks.entry(name.to_owned()).or_default().push(block.clone());
                }
            }
            _ => {}
        }
    }

    fn declare(&self, owner: &str, member: &str) -> bool {
        let names = [Some(owner), self.aliases.get(owner).map(String::as_str)];
        let mut blocks = names.into_iter().flatten().filter_map(|name| self.blocks.get(name)).flatten();
        blocks.any(|block| declares(block, member))
    }
}

/// Returns whether a declaration contains a field, a variant, a constant or a function of this name.
fn declares(block: &str, member: &str) -> bool {
    let ends = |rest: &str| !rest.starts_with(is_word);
    let names = |line: &str, keyword: &str| {
        line.split(keyword).skip(1).any(|rest| rest.strip_prefix(member).is_some_and(ends))
    };
    block.lines().map(without_visibility).any(|line| {
        let rest = line.strip_prefix(member).filter(|rest| ends(rest));
        let variant = member.starts_with(char::is_uppercase);
        names(line, "fn ")
            || names(line, "const ")
            || rest.is_some_and(|rest| {
                if variant {
                    rest.trim_start().starts_with(['(', ',', '{', '='])
                } else {
                    rest.starts_with(':') && !rest.starts_with("::")
                }
            })
    })
}

/// Returns a line without indentation, `pub`, `pub(…)` and `unsafe`.
fn without_visibility(line: &str) -> &str {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with(' ') => rest,
        Some(rest) if rest.starts_with('(') => rest.split_once(')').map_or(line, |(_, rest)| rest),
        _ => line,
    };
    let line = line.trim_start();
    line.strip_prefix("unsafe ").unwrap_or(line)
}

/// Returns the Rust files of the checkout, without build outputs.
fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR"))];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder of the checkout").flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found
}
