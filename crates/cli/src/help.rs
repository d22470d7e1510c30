//! Help texts, made from the table of options.

use crate::options::{Command, DefaultValue, Kind, OPTIONS, OptionSpec, Section};

/// How every command ends.
pub const EXIT_CODES: &str = "Exit codes: 0 done, 1 refused or failed while running, 2 wrong usage, 130 after Ctrl-C.";

/// The program's help, or one command's. Short help leaves out developer options and defaults.
pub fn help(command: Option<Command>, long: bool) -> String {
    match command {
        None => general(),
        Some(command) => of_command(command, long),
    }
}

fn general() -> String {
    let mut text = String::from(
        "tensorfold: exact inference for DeepSeek-V4.1\n\nUsage: tensorfold COMMAND [MODEL] [OPTIONS]\n\nCommands:\n",
    );
    for command in Command::ALL {
        let (arguments, job) = command.help();
        text += &format!("  {:<9} {arguments:<17} {job}\n", command.name());
    }
    text += "\nMODEL is a folder, org/name in the hub cache, or left out for the built-in tiny-dsv41.\n\
             `tensorfold COMMAND --help` lists a command's options; `tensorfold --version` says what this build is.\n";
    text += &format!("{EXIT_CODES}\n");
    text
}

fn of_command(command: Command, long: bool) -> String {
    let (arguments, job) = command.help();
    let usage = format!("tensorfold {} {arguments}", command.name());
    let mut text = format!("{job}\n\nUsage: {} [OPTIONS]\n", usage.trim());
    for section in Section::ALL.into_iter().rev() {
        let mut options = OPTIONS.iter().filter(|spec| shown(spec, command, section, long)).peekable();
        if options.peek().is_none() {
            continue;
        }
        let title = match section {
            Section::Command => "Options of this command",
            other => other.title(),
        };
        text += &format!("\n{title}:\n");
        for spec in options {
            text += &line(spec, long);
        }
    }
    if !long {
        text += "\n--help shows defaults, other names and developer options.\n";
    }
    text
}

fn shown(spec: &OptionSpec, command: Command, section: Section, long: bool) -> bool {
    let wanted = long || spec.later.is_empty() && !spec.help.starts_with("developer:");
    spec.section == section && spec.commands.contains(&command) && wanted
}

fn line(spec: &OptionSpec, long: bool) -> String {
    let name = match spec.kind {
        Kind::Toggle => format!("--{0}, --no-{0}", spec.flag),
        kind => format!("--{} {}", spec.flag, kind.placeholder()),
    };
    let mut text = format!("  {:<32} {}", name.trim(), spec.help);
    if name.trim().len() > 32 {
        text = format!("  {}\n  {:<32} {}", name.trim(), "", spec.help);
    }
    if !long {
        return text + "\n";
    }
    match spec.default {
        _ if !spec.later.is_empty() => text += " (not built yet)",
        DefaultValue::Is(value) => text += &format!(" [{value}]"),
        DefaultValue::Says(value) => text += &format!(" [{value}]"),
    }
    if !spec.aliases.is_empty() {
        let names: Vec<&str> = spec.aliases.iter().map(|alias| alias.name).collect();
        text += &format!(" (also {})", names.join(", "));
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lists_what_a_command_takes() {
        let general = help(None, true);
        assert!(Command::ALL.iter().all(|command| general.contains(&format!("\n  {}", command.name()))));
        let (short, long) = (help(Some(Command::Serve), false), help(Some(Command::Serve), true));
        assert!(short.contains("--port N") && !short.contains("--numerics") && !short.contains("--tls-cert"));
        assert!(long.contains("--numerics release") && long.contains("(not built yet)"));
        assert!(long.contains("[8080]") && long.contains("(also --max-model-len, -c, --ctx-size)"));
        assert!(!help(Some(Command::Models), true).contains("--port"));
        let widest = general.lines().chain(short.lines()).map(str::len).max();
        assert!(widest.is_some_and(|width| width <= 160), "{widest:?}");
    }
}
