//! The reference page of the options, made from their table. Built for the test that keeps it fresh.

use crate::options::{
    Answer, Command, DefaultValue, FOREIGN, Honour, Kind, OPTIONS, OptionSpec, PASTED, SECOND_WAVE_FLAGS, Section,
    other_build,
};

/// `docs/reference/options.md`.
fn page() -> String {
    let mut page = format!(
        "# Options\n\nGenerated from the program's own table; `cargo xtask gen` rewrites it.\n\nEvery option has a flag, \
         a variable `TENSORFOLD_` + the flag in capitals with `_` (`--max-tokens` is `TENSORFOLD_MAX_TOKENS`; a repeatable \
         one takes a list with commas), and a key in the TOML file that `--config` names, above all tables or below \
         `[COMMAND]`. The flags `--format`, `--json`, `--prompt` and `--rows` mean different things to different commands: \
         their variables carry the command's name (`TENSORFOLD_BENCH_FORMAT`), and their keys stand below it. \
         Flag beats variable beats file \
         beats default; `tensorfold info --options` shows which one won. Sizes: `512MiB`, `16g` (binary) or `64GB` (decimal). \
         Counts: `32k` is 32,768, `1M` is 1,048,576. {}\n\n## Commands\n\n| command | job |\n| --- | --- |\n",
        crate::help::EXIT_CODES
    );
    for command in Command::ALL {
        let (arguments, help) = command.help();
        page += &format!("| `{}` | {help} |\n", format!("{} {arguments}", command.name()).trim());
    }
    for section in Section::ALL {
        page += &format!("\n## {}\n\n| option | default | meaning | also | commands |\n", section.title());
        page += "| --- | --- | --- | --- | --- |\n";
        for spec in OPTIONS.iter().filter(|spec| spec.section == section) {
            page += &row(spec);
        }
        page += note(section);
    }
    page += "\n## Flags of other programs\n\n| flag | answer |\n| --- | --- |\n";
    for pasted in PASTED {
        let answer = match pasted.answer {
            Answer::NoEffect => "accepted; a note says that it has no effect".to_owned(),
            Answer::Values(values, reason) => {
                format!("`{}` accepted with a note, else refused: {reason}", values.join("`, `"))
            }
            Answer::Refused(reason) => format!("refused: {reason}"),
        };
        page += &format!("| `{}` | {answer} |\n", pasted.name);
    }
    let flags = SECOND_WAVE_FLAGS.join("`, `");
    page += &format!("\nNot built yet and refused by name: `{flags}`.\n");
    page += "\n## Variables of other projects\n\n| variable | here |\n| --- | --- |\n";
    for (name, honour, meaning) in FOREIGN {
        let text = match (honour, *meaning) {
            (Honour::Read, meaning) => meaning.to_owned(),
            (Honour::NoEffect, "") => "accepted without effect".to_owned(),
            (Honour::NoEffect, meaning) => format!("accepted without effect: {meaning}"),
            (Honour::Later, meaning) => format!("not read yet ({meaning})"),
        };
        page += &format!("| `{name}` | {text} |\n");
    }
    page
}

/// What stands below a section's table.
fn note(section: Section) -> &'static str {
    match section {
        Section::Devices => {
            "\nThe files of a checkpoint must stay as they are while it is served. The n-gram tables are read from them all the \
             time with `--engram mmap` and `disk`, and on Metal all large weights are. Whether these files have changed is asked \
             before each round that reads mapped rows, and once a second: then requests get 503 `checkpoint_changed`, and \
             `/health` names the file. A mapped file that is cut short in the very moment in which it is read still ends the \
             process (SIGBUS), as it does while the weights are loaded. So put a new version beside the old one and rename it, or \
             use `--engram ram`, which reads no file any more once the server is ready.\n"
        }
        _ => "",
    }
}

fn row(spec: &OptionSpec) -> String {
    let escape = |text: &str| text.replace('|', "\\|");
    let flag = match spec.kind {
        Kind::Toggle => format!("`--{0}`, `--no-{0}`", spec.flag),
        kind => format!("`{}`", escape(format!("--{} {}", spec.flag, kind.placeholder()).trim())),
    };
    let repeat = if spec.repeatable { " (repeatable)" } else { "" };
    let default = match spec.default {
        DefaultValue::Is(value) => format!("`{value}`"),
        DefaultValue::Says(text) => text.to_owned(),
    };
    let mut meaning = escape(spec.help);
    if let Kind::Choice { later, .. } = spec.kind {
        let builds: Vec<&str> = later.iter().filter_map(|word| other_build(word)).collect();
        let absent: Vec<&str> = later.iter().copied().filter(|word| other_build(word).is_none()).collect();
        if !builds.is_empty() {
            meaning += &format!(" ({})", builds.join(", "));
        }
        if !absent.is_empty() {
            meaning += &format!(" (not built yet: {})", absent.join(", "));
        }
    }
    if !spec.later.is_empty() {
        meaning = format!("not built yet: {meaning}");
    }
    let also: Vec<String> = spec.aliases.iter().map(|alias| format!("`{}`", alias.name)).collect();
    let commands = match spec.commands.len() == Command::ALL.len() {
        true => "all".to_owned(),
        false => spec.commands.iter().map(|command| command.name()).collect::<Vec<_>>().join(", "),
    };
    format!("| {flag}{repeat} | {default} | {meaning} | {} | {commands} |\n", also.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_page_of_options_is_fresh() {
        if crate::build::BACKENDS != ["cpu"] {
            eprintln!("SKIPPED 1 test: the page is that of a build without GPUs");
            return;
        }
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/options.md");
        if std::env::var_os("TENSORFOLD_GENERATE").is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == page(), "docs/reference/options.md is stale: run `cargo xtask gen`");
    }
}
