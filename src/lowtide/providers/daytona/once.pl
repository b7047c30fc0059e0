# Runs a command once and answers for it, at once when it is short. Arguments: a path of its own, mark,
# tag, directory, working directory, number of files to drop, these, number of variables, these, command.
# The answer is the mark and: "=CODE;LEADER;OUT;ERR;" it has ended, the streams in base64;
# "+LEADER;" it goes on, and its streams come out of PATH.o and PATH.e as lines of base64 with the mark
# and the exit code at their end; "!" nothing was run; "-" it was run before, and its answer is lost.
# Perl's own functions only: loading a module costs more than all of this.
my ($b, $m, $tag, $dir, $work, $n, @c) = @ARGV;
delete $ENV{PERL_BADLANG};
unlink splice @c, 0, $n;
$n = shift @c;
my @env = splice @c, 0, $n;
sub answer { syswrite STDOUT, "$m$_[0]\n"; exit 0 }
sub nap { select undef, undef, undef, $_[0] }
if (!sysopen K, $b, 193, 0600) {    # write, create, only if it is not there
	answer("!;") if $! != 17;
	for (1 .. 600) {                # sent a second time: the first one answers
		if (open A, "<", "$b.a") { local $/; syswrite STDOUT, <A>; exit 0 }
		my $pid = open(K, "<", $b) ? <K> : "";
		answer("-;") if $pid && !-d "/proc/$pid" && !-e "$b.a";
		nap(0.02);
	}
	answer("-;");
}
pipe(A, B) or answer("!;");
my $front = fork;
answer("!;") unless defined $front;
if ($front) {
	close B;
	my $all = "";
	1 while sysread A, $all, 1 << 18, length $all;
	syswrite STDOUT, $all;
	exit 0;
}
setpgrp(0, 0);
open STDIN, "<", "/dev/null";
open STDOUT, ">", "/dev/null";
open STDERR, ">", "/dev/null";
syswrite K, $$;
close K;
close A;
pipe(O, P) && pipe(E, F) && pipe(R, W) or do { syswrite B, "$m!;\n"; exit };
my $pid = fork;
if (!defined $pid) { syswrite B, "$m!;\n"; exit }
if (!$pid) {
	setpgrp(0, 0);
	open STDOUT, ">&P";
	open STDERR, ">&F";
	if (length $dir) { chdir $dir or fail($dir) }
	elsif (length $work && !chdir $work) {
		my $made = "";
		for (split m{/}, $work) { $made .= "$_/"; mkdir $made }
		chdir $work or fail($work);
	}
	for (@env) { my ($name, $value) = split /=/, $_, 2; $ENV{$name} = $value }
	# The tag is a limit nothing else uses. How it is set is the processor's business.
	my ($head, $r) = ("", pack "QQ", $tag, $tag);
	if (open X, "<", "/proc/self/exe") { sysread X, $head, 20; close X }
	my $call = { 62 => 160, 183 => 164, 243 => 164 }->{unpack "x18v", $head . "\0" x 20};
	if ($call) { syscall $call, 10, $r }
	else { unshift @c, "/bin/sh", "-c", 'ulimit -w $0 2>/dev/null||ulimit -x $0 2>/dev/null;exec "$@"', $tag }
	exec { $c[0] } @c;
	my $code = $! == 2 ? 127 : 126;
	syswrite STDERR, "$c[0]: " . ($code == 127 ? "not found" : $!) . "\n";
	exit $code;
}
sub fail { syswrite STDERR, "cd: $_[0]: $!\n"; exit 126 }
$SIG{PIPE} = "IGNORE";
$SIG{CHLD} = sub { syswrite W, "x" };
syswrite W, "x";    # it may have ended before we listened
close P;
close F;
my ($code, $size, $left, $fifos) = (undef, 0, 0.15, 1);
my ($HOLD, $FOLLOWED, $ANSWERED) = (0, 1, 2);    # what is read: kept for the answer, told on, dropped
my $mode = $HOLD;
my %open = (1 => *O, 2 => *E);
my %held = (1 => "", 2 => "");

sub encoded {
	my ($d) = @_;
	return "" if !length $d;
	my $x = pack("u", $d);
	$x =~ s/^.//mg;
	$x =~ tr/\n//d;
	$x =~ tr|` -_|AA-Za-z0-9+/|;
	my $pad = (3 - length($d) % 3) % 3;
	substr($x, -$pad) = "=" x $pad if $pad;
	return $x;
}
sub all { my ($f, $d) = @_; while (length $d) { my $n = syswrite $f, $d; if (defined $n) { substr($d, 0, $n) = "" } elsif ($! != 4) { last } } }
sub told { my ($s, $d) = @_; all($s == 1 ? *STDOUT : *STDERR, encoded($d) . "\n") if length $d }
sub answered {    # kept first: it may be asked for again
	my ($text) = @_;
	if (sysopen T, "$b.t", 193, 0600) { all(*T, "$m$text\n"); close T; rename "$b.t", "$b.a" }
	all(*B, "$m$text\n");
	close B;
}
sub take {        # false at the end of the stream
	my ($s) = @_;
	my $n = sysread $open{$s}, my $d, 65536;
	return 1 if !defined $n;
	if (!$n) { close $open{$s}; delete $open{$s}; return 0 }
	if ($mode == $FOLLOWED) { told($s, $d) }
	elsif ($mode == $HOLD) { $held{$s} .= $d; $left = 0.04 if !$size && $left > 0.04; $size += $n }
	return 1;
}
sub ready { my ($s, $t) = @_; my $r = ""; vec($r, fileno $open{$s}, 1) = 1; return select($r, undef, undef, $t) > 0 }
sub follow {      # it takes longer, or says more, than one answer should: whoever asked reads on elsewhere
	$fifos = !system("mkfifo", "-m", "600", "$b.o", "$b.e");
	return if !$fifos;
	answered("+$pid;");
	for (["$b.o", *STDOUT], ["$b.e", *STDERR]) { 1 until open($_->[1], ">", $_->[0]) || $! != 4 }
	unlink "$b.o", "$b.e";
	$mode = $FOLLOWED;
	told($_, $held{$_}) for 1, 2;
	%held = ();
}

while (!defined $code || %open) {
	my $r = "";
	vec($r, fileno R, 1) = 1 if !defined $code;
	vec($r, fileno $_, 1) = 1 for values %open;
	my $waits = $mode == $HOLD && $fifos;
	(my $found, my $rest) = select($r, undef, undef, $waits ? $left : undef);
	next if $found < 0;
	$left = $rest if $waits;
	if ($waits && ($found == 0 || $size > 98304)) { follow(); next }
	for my $s (1, 2) { take($s) if $open{$s} && vec($r, fileno $open{$s}, 1) }
	if (!defined $code && vec($r, fileno R, 1)) {
		sysread R, my $x, 64;
		if (waitpid($pid, 1) == $pid) {
			$code = $? & 127 ? 128 + ($? & 127) : $? >> 8;
			# What a pipe holds is soon read; whoever goes on writing is not the command.
			for my $s (1, 2) { my $n = 16; 1 while $n-- && $open{$s} && ready($s, 0) && take($s) }
			if ($mode == $FOLLOWED) { told($_, "$m=$code;") for 2, 1 }
			else {
				answered("=$code;$pid;" . encoded($held{1}) . ";" . encoded($held{2}) . ";");
				$mode = $ANSWERED;
				%held = ();
			}
		}
	}
}
