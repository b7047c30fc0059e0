# Runs a command once and answers for it, at once when it is short. Arguments: a path of its own, mark,
# tag, the programs `again.pl`, `gather.pl` and `follow.pl`, directory, working directory, number of files to
# drop, these, number of variables, these, command.
# The answer is the mark and: "=CODE;LEADER;OUT;ERR;" it has ended, the streams in base64;
# "+LEADER;" it goes on, and can be followed (`follow.pl`); "!" nothing was run; "-" it was run before,
# and its answer is lost.
# Perl's own functions only, and nothing compiled before it is needed: both cost more than all of this.
my ($b, $m, $tag, $again, $gather, $follow, $dir, $work, $n, @c) = @ARGV;
delete $ENV{PERL_BADLANG};
unlink splice @c, 0, $n;
$n = shift @c;
my @env = splice @c, 0, $n;
sub answer { syswrite $_[0], "$m$_[1]\n"; exit 0 }
if (!sysopen K, $b, 193, 0600) {    # write, create, only if it is not there
	answer(*STDOUT, "!;") if $! != 17;
	eval $again;
}
pipe(A, B) or answer(*STDOUT, "!;");
my $front = fork;
answer(*STDOUT, "!;") if !defined $front;
if ($front) {
	close B;
	my $all = "";
	1 while sysread A, $all, 1 << 18, length $all;
	syswrite STDOUT, $all;
	exit 0;
}
setpgrp(0, 0);
open STDIN, "<", "/dev/null";
syswrite K, $$;
close K;
close A;
pipe(O, P) && pipe(E, F) && pipe(R, W) or answer(*B, "!;");
my $pid = fork;
answer(*B, "!;") if !defined $pid;
if (!$pid) {
	setpgrp(0, 0);
	open STDOUT, ">&P";
	open STDERR, ">&F";
	sub fail { syswrite STDERR, "cd: $_[0]: $!\n"; exit 126 }
	if (length $dir) { chdir $dir or fail($dir) }
	elsif (length $work && !chdir $work) {
		my $made = "";
		for (split m{/}, $work) { $made .= "$_/"; mkdir $made }
		chdir $work or fail($work);
	}
	for (@env) { my ($name, $value) = split /=/, $_, 2; $ENV{$name} = $value }
	# The tag is a limit nothing else uses. How it is set is the processor's business.
	my ($head, $r) = ("", pack "QQ", $tag, $tag);
	if (open X, "<", "/proc/self/exe") { sysread X, $head, 20 }
	my $call = { 62 => 160, 183 => 164, 243 => 164 }->{unpack "x18v", $head . "\0" x 20};
	if ($call) { syscall $call, 10, $r }
	else { unshift @c, "/bin/sh", "-c", 'ulimit -w $0 2>/dev/null||ulimit -x $0 2>/dev/null;exec "$@"', $tag }
	exec { $c[0] } @c;
	my $code = $! == 2 ? 127 : 126;
	syswrite STDERR, "$c[0]: " . ($code == 127 ? "not found" : $!) . "\n";
	exit $code;
}
eval $gather;    # while the command is starting
